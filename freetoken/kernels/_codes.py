"""What codes mean, in Triton: the words of a tile become float32 weights, the same way for every kernel.

A block reads words once and takes one digit after the other (rows), or all digits at once (columns of
down); numbers that scale are read once for the run of weights that they cover. `meaning` turns a
core.codes.Matrix into M, the compile-time numbers that the device functions follow (no tuple of tuples of
tuples gets through the compiler):

    0 level    1 zero    2 words   3 sign    4 H        5 digits of a first plane's word
    6 line     words of a line of gate or up            7 span    columns of I in a unit of down
    8 planes   9 steps   10 leasts                      11 (bits, offset) of two planes
    15 three steps, 30 three leasts, five numbers each: kind, offset, tall, wide, numbers of a line

No function here knows a format, or asks for an instruction that older cards lack: small floats are put
together from bits.
"""

from __future__ import annotations

from freetoken.core.codes import IQ4, LEVELS, NUMBERS, Coded, Matrix, Scale
from freetoken.kernels._triton import constexpr, jit, tl

LANES = 16
"""Neighbours in a row that one number of a step covers at least."""


def _packed(values: tuple[int, ...]) -> int:
    """Four signed bytes as an int32, lowest first."""
    word = sum((v & 255) << (8 * place) for place, v in enumerate(values))
    return word - (1 << 32) if word >> 31 else word


_TABLE = [constexpr(_packed(IQ4[at : at + 4])) for at in range(0, 16, 4)]
IQ4_A, IQ4_B, IQ4_C, IQ4_D = _TABLE


def meaning(matrix: Matrix, h: int) -> tuple[int, ...]:
    """M of a matrix."""
    bits = matrix.planes[0][0]
    digits = 16 // bits if matrix.words else 1
    line = -(-h // (32 * digits)) * 32 if matrix.words else h
    span = 1 if not matrix.words else 2 if bits == 8 else 2 * digits
    assert max(len(matrix.step), len(matrix.least)) <= 3 and len(matrix.planes) <= 2
    assert all(16 // b % digits == 0 for b, _ in matrix.planes[1:])

    def numbers(scales: tuple[Scale, ...]) -> list[int]:
        each = [
            (NUMBERS.index(s.kind), s.offset, s.tall, s.wide or 1, -(-h // (s.wide or 1))) for s in scales
        ]
        return [n for one in (each + [(0,) * 5] * 3)[:3] for n in one]

    planes = [n for plane in (*matrix.planes, (0, 0))[:2] for n in plane]
    head = (LEVELS.index(matrix.level), matrix.zero, int(matrix.words), matrix.sign, h, digits, line, span)
    counts = (len(matrix.planes), len(matrix.step), len(matrix.least))
    return (*head, *counts, *planes, *numbers(matrix.step), *numbers(matrix.least))


_SIZES = {"f16": 2, "f32": 4}


def regions(coded: Coded, run: int) -> tuple[tuple[int, int, int, int, int], ...]:
    """(offset, span, stride, count, unit) of what a run of `run` columns of I reads of a tile, in bytes.

    The run that begins at column i reads [offset + i // span * stride, + count); unit divides all of them.
    """
    found: list[tuple[int, int, int, int]] = []
    h = coded.hidden
    for matrix in coded.matrices:
        for bits, offset in matrix.planes:
            if not matrix.words:
                found.append((offset, 1, h * bits // 8, run * h * bits // 8))
            elif not matrix.down:
                line = -(-h * bits // 512) * 64
                found.append((offset, 1, line, run * line))
            else:
                span = 32 // bits if bits < 8 else 2
                stride = h * (4 if bits < 8 else 2)
                found.append((offset, span, stride, -(-run // span) * stride))
        for scale in (*matrix.step, *matrix.least):
            size = _SIZES.get(scale.kind, 1)
            if not scale.tall:
                found.append((scale.offset, 1, 0, size))
                continue
            stride = -(-h // scale.wide) * size
            found.append((scale.offset, scale.tall, stride, -(-run // scale.tall) * stride))
    if coded.bias_offset:
        found.append((coded.bias_offset, 1, 4, 4 * run))
        found.append((coded.bias_offset + 4 * coded.tile_width, 1, 4, 4 * run))
    return tuple((*one, _unit(one, run)) for one in dict.fromkeys(found))


def _unit(region: tuple[int, int, int, int], run: int) -> int:
    """The largest access, up to 16 bytes, that a region's bytes fall into wherever a run begins."""
    offset, span, stride, count = region
    step = max(1, run // span) * stride
    unit = 16
    while offset % unit or step % unit or count % unit:
        unit //= 2
    return unit


@jit
def carry(source, keep, first, REGIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy what the run that begins at column `first` reads of the tile at `source` to the one at `keep`."""
    for r in tl.static_range(len(REGIONS)):
        start = REGIONS[r][0] + (first // REGIONS[r][1]) * REGIONS[r][2]
        copy_bytes(source + start, keep + start, REGIONS[r][3], REGIONS[r][4], BLOCK)


@jit
def copy_bytes(source, keep, COUNT: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """COUNT bytes from one address to another, BLOCK at a time; both are multiples of UNIT."""
    if UNIT >= 4:
        there = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), UNIT)
        home = tl.multiple_of(keep.to(tl.pointer_type(tl.int32)), UNIT)
        for at in range(0, COUNT // 4, BLOCK // 4):
            place = at + tl.arange(0, BLOCK // 4)
            some = tl.load(there + place, mask=place < COUNT // 4, other=0, eviction_policy="evict_first")
            tl.store(home + place, some, mask=place < COUNT // 4)
    else:
        there = source.to(tl.pointer_type(tl.uint8))
        home = keep.to(tl.pointer_type(tl.uint8))
        for at in range(0, COUNT, BLOCK // 4):
            place = at + tl.arange(0, BLOCK // 4)
            some = tl.load(there + place, mask=place < COUNT, other=0, eviction_policy="evict_first")
            tl.store(home + place, some, mask=place < COUNT)


@jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@jit
def _e4m3(code):
    """Exponent and mantissa moved to their places in a float, whose exponents begin 2^120 lower."""
    return float_of(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * 1.329227995784916e36


@jit
def _whole(code, ZERO: tl.constexpr):
    """A whole number below 2^23, minus ZERO: as the mantissa of a float from 2^23 on, with no conversion."""
    return float_of(code | 0x4B000000) - (8388608.0 + ZERO)


@jit
def level(code, KIND: tl.constexpr, ZERO: tl.constexpr):
    """An int32 code as float32; KIND as in LEVELS."""
    if KIND == 0:
        value = _whole(code, ZERO)
    elif KIND == 1:
        value = _whole(code ^ 128, 128)
    elif KIND == 2:
        value = float_of(((code & 8) << 28) | ((code & 7) << 22)) * 8.507059173023462e37
    elif KIND == 3:
        value = _e4m3(code)
    elif KIND == 4:
        low = tl.where((code & 4) == 0, IQ4_A, IQ4_B)
        four = tl.where((code & 8) == 0, low, tl.where((code & 4) == 0, IQ4_C, IQ4_D))
        value = _whole(((four >> ((code & 3) * 8)) & 255) ^ 128, 128)
    elif KIND == 5:
        value = float_of(code << 16)
    elif KIND == 6:
        value = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = float_of(code)
    return value


@jit
def number(tile, i, j, mask, M: tl.constexpr, AT: tl.constexpr):
    """A number that M describes from AT on: the j-th along H of those that cover i, or the scalar for all."""
    KIND: tl.constexpr = M[AT]
    TALL: tl.constexpr = M[AT + 2]
    if TALL > 0:
        index = (i // TALL) * M[AT + 4] + j
    else:
        index = 0
        mask = True
    at = tile + M[AT + 1]
    if KIND == 0:
        value = tl.load(at.to(tl.pointer_type(tl.float16)) + index, mask=mask, other=0.0).to(tl.float32)
    elif KIND == 1:
        value = tl.load(at.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0.0)
    else:
        code = tl.load(at + index, mask=mask, other=0).to(tl.int32)
        if KIND == 2:
            value = _whole(code, 0)
        elif KIND == 3:
            value = _whole(code ^ 128, 128)
        elif KIND == 4:
            value = _e4m3(code)
        elif KIND == 5:
            value = float_of(tl.maximum(code << 23, 0x00400000))  # 0: 2^-127, below the normal ones
        elif KIND == 6:
            value = _whole(code & 15, 0)
        elif KIND == 7:
            value = _whole(code >> 4, 0)
        else:
            value = _whole(code, 32)
    return value


@jit
def _product(tile, i, h, mask, M: tl.constexpr, AT: tl.constexpr, COUNT: tl.constexpr):
    value = number(tile, i, h // M[AT + 3], mask, M, AT)
    for s in tl.static_range(1, COUNT):
        value = value * number(tile, i, h // M[AT + 5 * s + 3], mask, M, AT + 5 * s)
    return tl.broadcast_to(value, mask.shape)


@jit
def _spread(value, AXIS: tl.constexpr):
    """A number for weights that follow each other along an axis."""
    return value[:, None, :] if AXIS == 1 else value[:, :, None]


@jit
def _scaled(value, tile, i, h, mask, M: tl.constexpr, AXIS: tl.constexpr):
    """value * step - sign * least; i, h, mask without AXIS of `value`, along which both are the same."""
    if M[9] > 0:
        value *= _spread(_product(tile, i, h, mask, M, 15, M[9]), AXIS)
    if M[10] > 0:
        value -= _spread(_product(tile, i, h, mask, M, 30, M[10]) * M[3], AXIS)
    return value


@jit
def _of_kind(tile, OFFSET: tl.constexpr, BITS: tl.constexpr):
    """Where words of so many bits begin."""
    if BITS == 8:
        at = tile + OFFSET
    elif BITS == 16:
        at = (tile + OFFSET).to(tl.pointer_type(tl.uint16))
    else:
        at = (tile + OFFSET).to(tl.pointer_type(tl.int32))
    return at


# --- gate and up: rows of words; units of LANES neighbours ------------------------------------------


@jit
def row_words(tile, row, unit, M: tl.constexpr, PLANE: tl.constexpr):
    """int32 [rows, units, LANES] of a plane; unit int32 [units] of the first plane's line."""
    BITS: tl.constexpr = M[11 + 2 * PLANE]
    lane = tl.arange(0, 16)
    column = unit[:, None] * 16 + lane[None, :]
    LINE: tl.constexpr = M[6] if PLANE == 0 else tl.cdiv(M[4], 32 * (16 // BITS)) * 32
    if PLANE > 0:
        column = (
            (unit // 2 // ((16 // BITS) // M[5]))[:, None] * 32 + (unit % 2)[:, None] * 16 + lane[None, :]
        )
    base = _of_kind(tile, M[12 + 2 * PLANE], 16 if M[2] else BITS)
    real = (column < LINE)[None, :, :] & (row >= 0)[:, None, None]
    at = base + (row * LINE)[:, None, None] + column[None, :, :]
    return tl.load(at, mask=real, other=0, eviction_policy="evict_first").to(tl.int32)


@jit
def row_column(unit, Q: tl.constexpr, M: tl.constexpr):
    """int32 [units]: the first of the LANES columns of H whose codes are digit Q of a unit's words."""
    return (unit // 2) * (32 * M[5]) + Q * 32 + (unit % 2) * 16


@jit
def row_weights(tile, row, unit, word, later, Q: tl.constexpr, M: tl.constexpr):
    """float32 [rows, units, LANES]: digit Q of words that `row_words` read; beyond H anything."""
    BITS: tl.constexpr = M[11]
    code = word
    if M[5] > 1:
        code = (word >> (Q * BITS)) & ((1 << BITS) - 1)
    if M[8] > 1:
        MORE: tl.constexpr = M[13]
        shift = ((unit // 2 % ((16 // MORE) // M[5])) * M[5] + Q) * MORE
        code |= ((later >> shift[None, :, None]) & ((1 << MORE) - 1)) << BITS
    h = row_column(unit, Q, M)
    real = (h < M[4])[None, :] & (row >= 0)[:, None]
    return _scaled(level(code, M[0], M[1]), tile, row[:, None], h[None, :], real, M, 2)


# --- down: units of `span` columns of I, in one word for each of H ----------------------------------


@jit
def _down_shift(c, BITS: tl.constexpr):
    """Where in a word column c of a unit lies."""
    return c * 8 if BITS == 8 else c // 2 * BITS + c % 2 * 16


@jit
def _down_words(tile, line, col, inside, PLANE: tl.constexpr, M: tl.constexpr):
    BITS: tl.constexpr = M[11 + 2 * PLANE]
    WIDE: tl.constexpr = BITS if not M[2] else 16 if BITS == 8 else 32
    at = _of_kind(tile, M[12 + 2 * PLANE], WIDE) + (line * M[4])[:, None] + col[None, :]
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32)


@jit
def down_weights(tile, first, col, COUNT: tl.constexpr, M: tl.constexpr):
    """float32 [COUNT / span, span, columns]: of columns [first, + COUNT) of I, by columns `col` of H."""
    BITS: tl.constexpr = M[11]
    SPAN: tl.constexpr = M[7]
    unit = first // SPAN + tl.arange(0, COUNT // SPAN)
    c = tl.arange(0, SPAN)
    inside = (col < M[4])[None, :] & (unit >= 0)[:, None]
    code = _down_words(tile, unit, col, inside, 0, M)[:, None, :]
    if M[2]:
        code = (code >> _down_shift(c, BITS)[None, :, None]) & ((1 << BITS) - 1)
    if M[8] > 1:
        MORE: tl.constexpr = M[13]
        MORE_SPAN: tl.constexpr = 32 // MORE
        later = _down_words(tile, unit * SPAN // MORE_SPAN, col, inside, 1, M)
        shift = _down_shift((unit * SPAN % MORE_SPAN)[:, None] + c[None, :], MORE)
        code |= ((later[:, None, :] >> shift[:, :, None]) & ((1 << MORE) - 1)) << BITS
    i = (unit * SPAN)[:, None]
    return _scaled(level(code, M[0], M[1]), tile, i, col[None, :], inside, M, 1)
