"""Stored tensors laid into a record's tiles by the native library: the mirror of stored.h.

Knows bytes and addresses; which tensor is which part of what is the caller's to say. The lock of the
interpreter is taken twice for an expert, so that any number of loaders work side by side.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence

from freetoken.native.library import library

CODES, PART, SINGLE, HALVES, NIBBLES, EIGHTS, SORTED = range(7)
AS_THEY_LIE, FROM_BF16, FROM_F16, FROM_F32, RECIPROCAL, TURNED, FIELDS = range(7)
ANY, E4M3, F16, F32, E8M0 = range(5)
_SPAN = struct.Struct("iiqqqQ")


class Step(ctypes.Structure):
    """`ft_step`."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("tensor", ctypes.c_uint32),
        ("numbers", ctypes.c_uint32),
        ("finite", ctypes.c_uint32),
        ("item", ctypes.c_uint32),
        ("down", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("more", ctypes.c_uint32),
        ("start", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("span", ctypes.c_int64),
        ("lines", ctypes.c_int64),
        ("offsets", ctypes.c_int64 * 2),
    ]


class Laying:
    """Steps for all of a record; `shape` is H, w of I, tiles; `used` bytes of each tile are written."""

    def __init__(self, steps: Sequence[Step], shape: tuple[int, int, int], used: int) -> None:
        self._steps = (Step * len(steps))(*steps)
        self._shape = (ctypes.c_int64 * 3)(*shape)
        self._used = used

    def __call__(self, tensors: Sequence[int], tiles: int, tile_step: int) -> bool:
        """Lay the tensors at these addresses; False, and nothing is written, if a number is none."""
        lib = library()
        assert lib is not None
        places = (ctypes.c_void_p * len(tensors))(*tensors)
        return lib.lay(self._steps, places, self._shape, (tiles, tile_step, self._used))


def read_spans(spans: Iterable[tuple[int, int, int, int, int, int]], *, first_cached: bool) -> bool:
    """Read (cached handle, direct handle or -1, offset, bytes, least, address); False if one is cut short."""
    lib = library()
    assert lib is not None
    packed = [_SPAN.pack(*span) for span in spans]
    return lib.read_spans(b"".join(packed), len(packed), first_cached)
