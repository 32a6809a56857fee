"""Rest for Python's cyclic collector while very many objects are made that all stay.

Every so many of them it would look through everything there is, and find nothing: a second of a start with a
hundred thousand tensors. Reference counts free what is dropped all the same.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Nothing is collected inside; whoever has it off already, keeps it off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
