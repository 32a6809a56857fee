"""Records expanded on a CUDA device: each word is read once and its digits written where they belong.

A block owns some words of one matrix of one tile. What their digits mean is `kernels._codes`', as in a
layer-step of few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from freetoken.core.codes import Coded, Matrix, Scale
from freetoken.kernels import _codes as codes
from freetoken.kernels._triton import (
    INTERPRETED,
    Card,
    Launch,
    card,
    floor_power_of_two,
    jit,
    power_of_two,
    tl,
)
from freetoken.kernels._triton import supports as supports

RANK = 20
# Words of a block of rows, weights of one of down; the interpreter takes as long for large as for small ones.
_WEIGHTS = 1 << 15 if INTERPRETED else 2048


@jit
def expand_rows(
    records, out, out_stride, START: tl.constexpr, TILE: tl.constexpr, TO_START: tl.constexpr,
    TO_TILE: tl.constexpr, TO: tl.constexpr, W: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr,
    BL: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    tile, to = _places(records, out, out_stride, START, TILE, TO_START, TO_TILE, KIND)
    UNITS: tl.constexpr = (M[6] + 15) // 16
    DIGITS: tl.constexpr = M[5]
    COLUMNS: tl.constexpr = (UNITS + BU - 1) // BU
    row = (tl.program_id(2) // COLUMNS) * BL + tl.arange(0, BL)
    unit = (tl.program_id(2) % COLUMNS) * BU + tl.arange(0, BU)
    row = tl.minimum(row, W - 1)  # the last one more than once rather than one that isn't there
    word = codes.row_words(tile, row, unit, M, 0)
    later = word
    if M[8] > 1:
        later = codes.row_words(tile, row, unit, M, 1)
    for q in tl.static_range(DIGITS):
        weight = codes.row_weights(tile, row, unit, word, later, q, M)
        h = codes.row_column(unit, q, M)[:, None] + tl.arange(0, 16)[None, :]
        at = to + TO + (row * M[4])[:, None, None] + h[None, :, :]
        tl.store(at, weight.to(KIND), mask=(h < M[4])[None, :, :] & (row >= 0)[:, None, None])


@jit
def expand_down(
    records, out, out_stride, START: tl.constexpr, TILE: tl.constexpr, TO_START: tl.constexpr,
    TO_TILE: tl.constexpr, TO: tl.constexpr, W: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile, to = _places(records, out, out_stride, START, TILE, TO_START, TO_TILE, KIND)
    COLUMNS: tl.constexpr = (M[4] + BC - 1) // BC
    SPAN: tl.constexpr = M[7]
    first = (tl.program_id(2) // COLUMNS) * BL
    col = (tl.program_id(2) % COLUMNS) * BC + tl.arange(0, BC)
    weight = codes.down_weights(tile, first, col, BL, M)
    i = (first + tl.arange(0, BL // SPAN) * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    at = to + TO + (i * M[4])[:, :, None] + col[None, None, :]
    tl.store(at, weight.to(KIND), mask=(i < W)[:, :, None] & (col < M[4])[None, None, :])


@jit
def _places(
    records, out, out_stride, START: tl.constexpr, TILE: tl.constexpr, TO_START: tl.constexpr,
    TO_TILE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Where a block's tile lies, and where its weights go."""
    number, place = tl.program_id(0), tl.program_id(1)
    address = tl.load(records + number) + START + place.to(tl.int64) * TILE
    tile = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    to = out + number.to(tl.int64) * out_stride + TO_START + place.to(tl.int64) * TO_TILE
    return tile, to.to(tl.pointer_type(KIND))


@jit
def copy_bytes(records, out, out_stride, FROM: tl.constexpr, STEP: tl.constexpr, TO: tl.constexpr, TO_STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    number, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    source = (tl.load(records + number) + FROM + place * STEP).to(tl.pointer_type(tl.uint8))
    to = out + number * out_stride + TO + place * TO_STEP
    tl.store(to + at, tl.load(source + at, mask=at < COUNT, other=0), mask=at < COUNT)


def expand_records(records: Tensor, coded: Coded, out: Tensor, dtype: torch.dtype) -> None:
    if not records.shape[0]:
        return
    for launch in plan(records, coded, out, dtype, card(out.device)):
        launch()


def plan(records: Tensor, coded: Coded, out: Tensor, dtype: torch.dtype, where: Card) -> list[Launch]:
    _, to_tile, to_start, to_bias = coded.plain_bytes()
    w, h, count = coded.tile_width, coded.hidden, records.shape[0]
    args = (records, out, out.stride(0))
    found = []
    kind = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    for number, matrix in enumerate(coded.matrices):
        consts = {"START": coded.tiles_offset, "TILE": coded.tile_bytes, "TO_START": to_start}
        consts |= {"TO_TILE": to_tile, "TO": number * w * h, "W": w, "M": codes.meaning(matrix, h)}
        consts["KIND"] = kind
        kernel, sizes, blocks = _blocks(matrix, w, h)
        found.append(Launch(kernel, (count, coded.num_tiles, blocks), args, consts | sizes))
    if to_bias:
        whole = {"FROM": 0, "STEP": 0, "TO": 0, "TO_STEP": 0, "COUNT": 4 * h, "BLOCK": power_of_two(4 * h)}
        each = {"FROM": coded.tiles_offset + coded.bias_offset, "STEP": coded.tile_bytes}
        each |= {"TO": to_start + to_bias, "TO_STEP": to_tile, "COUNT": 8 * w, "BLOCK": power_of_two(8 * w)}
        found.append(Launch(copy_bytes, (count, 1), args, whole))
        found.append(Launch(copy_bytes, (count, coded.num_tiles), args, each))
    return found


def _blocks(matrix: Matrix, w: int, h: int) -> tuple[Any, dict[str, int], int]:
    """Kernel, sizes of a block, and blocks of one tile's matrix."""
    line, span = codes.meaning(matrix, h)[6:8]
    if matrix.down:
        wide = min(256, power_of_two(h))
        tall = max(span, min(floor_power_of_two(w), _WEIGHTS // wide))
        return expand_down, {"BL": tall, "BC": wide}, -(-w // tall) * -(-h // wide)
    units = -(-line // codes.LANES)
    wide = min(16, power_of_two(units))
    tall = max(1, min(power_of_two(w), _WEIGHTS // (wide * codes.LANES)))
    return expand_rows, {"BL": tall, "BU": wide}, -(-w // tall) * -(-units // wide)


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """Tiles of 32 x 2048 (256 x 2048 for six bits) in a form of each kind."""
    w, h = 32, 2048
    blocks = (Scale("e8m0", 99328, 1, 32), Scale("e8m0", 99328, 32, 1))
    fours = [Matrix(((4, 32768 * m),), "e2m1", (blocks[m == 2],), down=m == 2) for m in range(3)]
    eights = [
        Matrix(((8, 65536 * m),), "e4m3", (Scale("f32", 196608, 128, 128),), down=m == 2) for m in range(3)
    ]
    sixes = [
        Matrix(
            ((4, 32768 * m), (2, 98304 + 16384 * m)), "uint",
            (Scale("i8", 147456, 1, 16), Scale("f16", 159744, 1, 256)),
            (Scale("f16", 159744, 1, 256), Scale("u8", 147456, 1, 32)), zero=32, down=m == 2,
        )
        for m in range(3)
    ]  # fmt: skip
    bytes_ = [
        Matrix(((8, 65536 * m),), "int8", (Scale("f16", 196608, 1, 32),), words=False) for m in range(3)
    ]
    for matrices, size in ((fours, 105472), (eights, 198656), (sixes, 163840), (bytes_, 208896)):
        coded = Coded(h, w, 24, size, 0, (matrices[0], matrices[1], matrices[2]))
        records = torch.empty(16, dtype=torch.int64, device="meta")
        out = torch.empty(16, coded.plain_bytes()[0], dtype=torch.uint8, device="meta")
        yield lambda where, a=(records, coded, out): plan(*a, dtype, where)
