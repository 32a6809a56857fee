"""Pick the maker of an operation: the highest RANK among those that support the device.

A maker is a module with `RANK: int`, `supports(device_type: str) -> bool` and the operation's functions.
The choice is made once per (operation, device type) and logged.
"""

from __future__ import annotations

import functools
from types import ModuleType

from freetoken.core.log import logger

_log = logger("kernels")


@functools.cache
def choose(makers: tuple[ModuleType, ...], device_type: str) -> ModuleType:
    """Return the best maker for a torch device type (`cpu`, `cuda`)."""
    best = max((m for m in makers if m.supports(device_type)), key=lambda m: m.RANK)
    _log.debug("%s on %s", best.__name__.removeprefix("freetoken.kernels."), device_type)
    return best
