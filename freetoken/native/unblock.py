"""GGUF blocks cut into the streams of a tile by the native library: the mirror of unblock.h.

Knows bytes and addresses; which fields and planes a format has is the caller's to say. The lock of the
interpreter is free while it works, so several loaders cut side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from freetoken.native.library import library

FIELDS_MOST, PARTS_MOST = 8, 8
RAW, DIGITS, SIX_BITS = range(3)
UNCHECKED, HALF, E8M0 = range(3)


class Field(ctypes.Structure):
    """`ft_field`."""

    _fields_ = [
        ("into", ctypes.c_uint8),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("at", ctypes.c_uint8),
        ("num_bytes", ctypes.c_uint16),
        ("run", ctypes.c_uint16),
    ]


class Blocks(ctypes.Structure):
    """`ft_blocks`: a format as the library takes it apart."""

    _fields_ = [
        ("num_fields", ctypes.c_uint32),
        ("num_planes", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
        ("plane_bits", ctypes.c_uint32 * 2),
        ("part_bytes", ctypes.c_uint32 * PARTS_MOST),
        ("part_columns", ctypes.c_uint32 * PARTS_MOST),
        ("part_check", ctypes.c_uint32 * PARTS_MOST),
        ("fields", Field * FIELDS_MOST),
    ]


@dataclass(frozen=True)
class Lying:
    """Where a matrix of blocks lies: an address, bytes from row to row; H, and w of its I for each tile."""

    address: int
    step: int
    hidden: int
    width: int
    tiles: int


def blocks_of(
    fields: Sequence[Field],
    planes: Sequence[int],
    parts: Sequence[tuple[int, int, int]],
    shape: tuple[int, int, int],
) -> Blocks | None:
    """Describe a format; None if the library has no room for it.

    planes   bits of each
    parts    (bytes of a number, columns that one covers, check)
    shape    (columns of a block, bytes of a block, 1 if codes lie in words)
    """
    if len(fields) > FIELDS_MOST or len(parts) > PARTS_MOST or len(planes) > 2:
        return None
    out = Blocks(len(fields), len(planes), len(parts), *shape)
    out.fields[: len(fields)] = list(fields)
    out.plane_bits[: len(planes)] = list(planes)
    for i, (size, columns, check) in enumerate(parts):
        out.part_bytes[i], out.part_columns[i], out.part_check[i] = size, columns, check
    return out


def available() -> bool:
    return library() is not None


def unblock(blocks: Blocks, lying: Lying, streams: Sequence[int], step: int, *, down: bool) -> bool:
    """Cut a matrix into all its tiles; False if a factor isn't a number.

    streams   addresses in the first tile, planes and then parts; `step` bytes further are the next tile's
    """
    lib = library()
    assert lib is not None
    places = (ctypes.c_void_p * len(streams))(*streams)
    where = (lying.address, lying.step, lying.hidden, lying.width, lying.tiles)
    return lib.unblock(ctypes.byref(blocks), where, places, step, down)
