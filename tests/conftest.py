"""What all tests share: hypothesis draws the same examples in every run; a failure is the change's then.

What importing and collecting has left is kept out of garbage collections: there are so many of them, at each
capture of a graph for instance, that they took a sixth of the time of some tests.
"""

from __future__ import annotations

import gc

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
