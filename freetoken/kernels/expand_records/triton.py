"""Records expanded on a CUDA device: each word is read once and its digits written where they belong.

A block owns some words of one matrix of one tile. Numbers that scale are read per weight: neighbours share
them, so they come from the nearest cache. Only planes beyond the first are read once per digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from freetoken.core.codes import LEVELS, NUMBERS, Coded, Matrix, Scale
from freetoken.kernels._triton import INTERPRETED, Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports

RANK = 20
# Words of a block; the interpreter takes as long for a large block as for a small one.
_WORDS = 1 << 15 if INTERPRETED else 2048


@jit
def _bits_to_float(bits):
    return bits.to(tl.float32, bitcast=True)


@jit
def _number(tile, i, h, mask, KIND: tl.constexpr, OFFSET: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, PER: tl.constexpr):  # fmt: skip  # noqa: E501
    """The number of NUMBERS[KIND] that covers (i, h), PER of them a line."""
    index = tl.zeros_like(i + h)
    if TALL > 0:
        index = (i // TALL) * PER + h // WIDE
    at = tile + OFFSET
    if KIND == 0:
        value = tl.load(at.to(tl.pointer_type(tl.float16)) + index, mask=mask, other=0.0).to(tl.float32)
    elif KIND == 1:
        value = tl.load(at.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0.0)
    elif KIND == 3:
        value = tl.load(at.to(tl.pointer_type(tl.int8)) + index, mask=mask, other=0).to(tl.float32)
    else:
        code = tl.load(at + index, mask=mask, other=0).to(tl.int32)
        if KIND == 2:
            value = code.to(tl.float32)
        elif KIND == 4:
            value = _e4m3(code)
        else:
            value = tl.where(code == 0, 5.877471754111438e-39, _bits_to_float(code << 23))
    return value


@jit
def _e4m3(code):
    tiny = (code & 7).to(tl.float32) * 0.001953125
    large = _bits_to_float(((code & 0x7F) << 20) + 0x3C000000)
    value = tl.where((code & 0x78) == 0, tiny, large)
    return tl.where((code & 0x80) != 0, -value, value)


@jit
def _level(code, KIND: tl.constexpr, ZERO: tl.constexpr):
    """A code as float32; KIND as in LEVELS."""
    if KIND == 0:
        value = (code - ZERO).to(tl.float32)
    elif KIND == 1:
        value = tl.where(code > 127, code - 256, code).to(tl.float32)
    elif KIND == 2:
        small = (code & 7).to(tl.float32) * 0.5
        value = tl.where((code & 7) < 2, small, _bits_to_float(((code & 7) << 22) + 0x3F000000))
        value = tl.where((code & 8) != 0, -value, value)
    else:
        value = _e4m3(code)
    return value


@jit
def _later_plane(tile, i, h, mask, BITS: tl.constexpr, OFFSET: tl.constexpr, H: tl.constexpr, DOWN: tl.constexpr):  # fmt: skip  # noqa: E501
    """The digit of (i, h) in a plane of fewer than eight bits."""
    DIGITS: tl.constexpr = 16 // BITS
    if DOWN:
        at = ((i // (2 * DIGITS)) * H + h) * 2 + i % 2
        shift = (i % (2 * DIGITS)) // 2 * BITS
    else:
        at = i * (tl.cdiv(H, 32 * DIGITS) * 32) + (h // (32 * DIGITS)) * 32 + h % 32
        shift = (h // 32) % DIGITS * BITS
    word = tl.load((tile + OFFSET).to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0).to(tl.int32)
    return (word >> shift) & ((1 << BITS) - 1)


@jit
def expand_matrix(
    records, out, out_stride, START: tl.constexpr, TILE: tl.constexpr, TO_START: tl.constexpr,
    TO_TILE: tl.constexpr, TO: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    PLANES: tl.constexpr, LEVEL: tl.constexpr, ZERO: tl.constexpr, WORDS: tl.constexpr, DOWN: tl.constexpr,
    STEP: tl.constexpr, LEAST: tl.constexpr, SIGN: tl.constexpr, KIND: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    number, place = tl.program_id(0), tl.program_id(1)
    address = tl.load(records + number) + START + place.to(tl.int64) * TILE
    tile = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    COLUMNS: tl.constexpr = (LINE + BC - 1) // BC
    line = (tl.program_id(2) // COLUMNS) * BL + tl.arange(0, BL)[:, None]
    column = (tl.program_id(2) % COLUMNS) * BC + tl.arange(0, BC)[None, :]
    real = (line < LINES) & (column < LINE)
    BITS: tl.constexpr = PLANES[0][0]
    OFFSET: tl.constexpr = PLANES[0][1]
    DIGITS: tl.constexpr = 16 // BITS if WORDS else 1
    if WORDS:
        at = line * LINE + column
        if DOWN and DIGITS > 2:
            at = (line // 2 * LINE + column) * 2 + line % 2
        word = tl.load((tile + OFFSET).to(tl.pointer_type(tl.uint16)) + at, mask=real, other=0).to(tl.int32)
    else:
        word = tl.load(tile + OFFSET + line * LINE + column, mask=real, other=0).to(tl.int32)
    row_of = (out + number.to(tl.int64) * out_stride + TO_START + place.to(tl.int64) * TO_TILE).to(
        tl.pointer_type(KIND)
    )
    for q in tl.static_range(DIGITS):
        if not WORDS:
            i, h, code = line, column, word
        elif not DOWN:
            i, h = line, (column // 32) * (32 * DIGITS) + q * 32 + column % 32
            code = (word >> (q * BITS)) & ((1 << BITS) - 1)
        else:
            i, h = line * 2 + q, column
            if DIGITS > 2:
                i = (line // 2) * (2 * DIGITS) + 2 * q + line % 2
            code = (word >> (q * BITS)) & ((1 << BITS) - 1)
        mask = real & (h < H) & (i < W)
        if len(PLANES) > 1:
            code |= _later_plane(tile, i, h, mask, PLANES[1][0], PLANES[1][1], H, DOWN) << BITS
        weight = _level(code, LEVEL, ZERO)
        for s in tl.static_range(len(STEP)):
            weight *= _number(tile, i, h, mask, STEP[s][0], STEP[s][1], STEP[s][2], STEP[s][3], STEP[s][4])
        if len(LEAST) > 0:
            least = _number(tile, i, h, mask, LEAST[0][0], LEAST[0][1], LEAST[0][2], LEAST[0][3], LEAST[0][4])
            if len(LEAST) > 1:
                least *= _number(
                    tile, i, h, mask, LEAST[1][0], LEAST[1][1], LEAST[1][2], LEAST[1][3], LEAST[1][4]
                )
            weight -= least * SIGN
        tl.store(row_of + TO + i * H + h, weight.to(KIND), mask=mask)


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
    for number, matrix in enumerate(coded.matrices):
        lines, line = _words(matrix, w, h)
        wide = min(256, power_of_two(line))
        tall = max(1, min(power_of_two(lines), _WORDS // wide))
        consts = _meaning(matrix, h) | {"START": coded.tiles_offset, "TILE": coded.tile_bytes}
        consts |= {"TO_START": to_start, "TO_TILE": to_tile, "TO": number * w * h, "W": w, "H": h}
        consts |= {"LINES": lines, "LINE": line, "BL": tall, "BC": wide}
        consts["KIND"] = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
        grid = (count, coded.num_tiles, -(-lines // tall) * -(-line // wide))
        found.append(Launch(expand_matrix, grid, args, consts))
    if to_bias:
        whole = {"FROM": 0, "STEP": 0, "TO": 0, "TO_STEP": 0, "COUNT": 4 * h, "BLOCK": power_of_two(4 * h)}
        each = {"FROM": coded.tiles_offset + coded.bias_offset, "STEP": coded.tile_bytes}
        each |= {"TO": to_start + to_bias, "TO_STEP": to_tile, "COUNT": 8 * w, "BLOCK": power_of_two(8 * w)}
        found.append(Launch(copy_bytes, (count, 1), args, whole))
        found.append(Launch(copy_bytes, (count, coded.num_tiles), args, each))
    return found


def _words(matrix: Matrix, w: int, h: int) -> tuple[int, int]:
    """Lines of a tile's first plane, and words (or bytes) of a line."""
    if not matrix.words:
        return w, h
    digits = 16 // matrix.planes[0][0]
    return (w // digits, h) if matrix.down else (w, -(-h // (32 * digits)) * 32)


def _meaning(matrix: Matrix, h: int) -> dict[str, Any]:
    def numbers(scales: tuple[Scale, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            (NUMBERS.index(s.kind), s.offset, s.tall, s.wide or 1, -(-h // (s.wide or 1))) for s in scales
        )

    return {
        "PLANES": matrix.planes,
        "LEVEL": LEVELS.index(matrix.level),
        "ZERO": matrix.zero,
        "WORDS": matrix.words,
        "DOWN": matrix.down,
        "STEP": numbers(matrix.step),
        "LEAST": numbers(matrix.least),
        "SIGN": matrix.sign,
    }


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
