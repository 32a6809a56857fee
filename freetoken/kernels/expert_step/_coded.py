"""Triton kernels of the arithmetic over coded records: bytes of a slot become weights in registers.

As in `_tiles`, a block owns a run of SUB columns of one expert's I. What arrives is first copied to its
slot, exactly the bytes that the run needs (numbers that two runs share are copied by both), and read from
there: the link is crossed once. Codes are read once for each row that is routed to the expert, or, for
more rows than that pays for, once for all of them through the matrix units, where a weight is the sum of
two 16-bit numbers: what it rounds to and the rest, so that its value is kept to float32's.
"""

from __future__ import annotations

from freetoken.kernels import _code_pairs as pairs
from freetoken.kernels import _codes as codes
from freetoken.kernels import _pdl as pdl
from freetoken.kernels import _slow_link as slow_link
from freetoken.kernels._gate import gate_up
from freetoken.kernels._triton import INTERPRETED, constexpr, jit, tl
from freetoken.kernels.expert_step._tiles import bias_of, find_block, route_of, routes_of, wants

INTERPRET = constexpr(INTERPRETED)


@jit
def _bring(
    source, keep, offset, run, first, H: tl.constexpr, BIAS: tl.constexpr, REGIONS: tl.constexpr
):  # fmt: skip
    """Copy what a run reads to its slot, whoever takes the first run the record's head as well."""
    codes.carry(source + offset, keep + offset, first, REGIONS, 8192)
    if BIAS > 0:  # noqa: SIM102 - decided while compiling
        if run == 0:
            codes.copy_bytes(source, keep, 4 * H, 4, 8192)
    # The whole block reads what each of its threads has stored.
    tl.debug_barrier()


@jit
def _first_half(tile, x, row, GATE: tl.constexpr, UP: tl.constexpr, SUB: tl.constexpr, STEP: tl.constexpr):
    """float32 [SUB] twice: rows of gate and of up times x, STEP columns at a time, the next on their way."""
    G: tl.constexpr = STEP * GATE[11] // 128
    U: tl.constexpr = STEP * UP[11] // 128
    g = tl.zeros([G, SUB], tl.float32)
    u = tl.zeros([U, SUB], tl.float32)
    coming = pairs.row_words(tile, row, tl.arange(0, G), GATE, 0)
    for at in range(0, GATE[4], STEP):
        piece = at * GATE[11] // 128 + tl.arange(0, G)
        beside = at * UP[11] // 128 + tl.arange(0, U)
        words = coming
        others = pairs.row_words(tile, row, beside, UP, 0)
        g = pairs.add_dots(g, tile, x, row, piece, words, GATE)
        coming = pairs.row_words(tile, row, piece + G, GATE, 0)
        u = pairs.add_dots(u, tile, x, row, beside, others, UP)
    return pairs.sum_of(g, GATE), pairs.sum_of(u, UP)


@jit
def _to_all(place, middle, SUB: tl.constexpr):
    """A tuple of scalars that every thread holds, through memory at `place` that is free until then."""
    tl.store(place + tl.arange(0, SUB), middle)
    tl.debug_barrier()
    found = ()
    for n in tl.static_range(SUB):
        found = found + (tl.load(place + n),)
    tl.debug_barrier()
    return found


@jit(varying=("records", "slots", "T"))
def coded_vector_rows(
    x, ids, work, partials, records, record_bytes, slots, slot_bytes, tiles_offset, tile_bytes, link, T,
    K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SUB: tl.constexpr,
    NT: tl.constexpr, STEP: tl.constexpr, BD: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    DOWN: tl.constexpr, REGIONS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.await_previous(PDL)
    PER: tl.constexpr = W // SUB
    run = tl.program_id(0)
    expert, mine, arrives, source, keep = find_block(
        work, tl.program_id(1), run, records, record_bytes, slots, slot_bytes, NT, PER
    )
    if mine:
        offset = tiles_offset + (run // PER).to(tl.int64) * tile_bytes
        first = (run % PER) * SUB
        due = slow_link.ask(link, arrives, tile_bytes // PER)
        if keep != 0:
            _bring(source, keep, offset, run, first, H, BIAS, REGIONS)
            source = keep
        slow_link.await_bytes(link, due)
        tile = tl.multiple_of((source + offset).to(tl.pointer_type(tl.uint8)), 16)
        row = first + tl.arange(0, SUB)
        for token in range(0, T):
            match = wants(ids, token, expert, K, KP)
            if tl.sum(match.to(tl.int32)) > 0:
                g, u = _first_half(tile, x + token * H, row, GATE, UP, SUB, STEP)
                words = pairs.down_words(tile, first, 0, SUB, BD, DOWN)
                if BIAS > 0:
                    g += bias_of(tile, BIAS, row)
                    u += bias_of(tile, BIAS + 4 * W, row)
                middle = gate_up(g, u, KIND, ALPHA, LIMIT, OFFSET).to(x.dtype.element_ty).to(tl.float32)
                pdl.let_next_start(PDL)
                route = route_of(match, token, K, KP)
                out = partials + (route.to(tl.int64) * NT * PER + run) * H
                each = _to_all(out, middle, SUB)
                for h in range(0, H, BD):
                    col = h + tl.arange(0, BD)
                    here = words
                    words = pairs.down_words(tile, first, h + BD, SUB, BD, DOWN)
                    y = pairs.down_dots(tile, here, each, first, h, SUB, BD, DOWN)
                    if BIAS > 0:
                        y += bias_of(source.to(tl.pointer_type(tl.uint8)), 0, tl.where(run == 0, col, H), H)
                    tl.store(out + col, y, mask=col < H)


@jit
def _two(weight, like):
    """What a float32 rounds to in like's type, and the rest."""
    high = weight.to(like)
    return high, (weight - high.to(tl.float32)).to(like)


@jit
def _mma(a, weight, total):
    """total + a @ weight."""
    if INTERPRET:
        total += tl.dot(a.to(tl.float32), weight)
    else:
        high, rest = _two(weight, a.dtype)
        total = tl.dot(a, rest, total)
        total = tl.dot(a, high, total)
    return total


@jit
def _products(tile, x, row, token, T, M: tl.constexpr, SUB: tl.constexpr, BU: tl.constexpr, TP: tl.constexpr):
    """float32 [TP, SUB]: rows of gate or up times each row of x."""
    UNITS: tl.constexpr = (M[6] + 15) // 16
    DIGITS: tl.constexpr = M[5]
    total = tl.zeros([TP, SUB], tl.float32)
    place = tl.arange(0, BU * 16)
    for at in range(0, UNITS, BU):
        unit = at + tl.arange(0, BU)
        word = codes.row_words(tile, row, unit, M, 0)
        later = word
        if M[8] > 1:
            later = codes.row_words(tile, row, unit, M, 1)
        for q in tl.static_range(DIGITS):
            h = codes.row_column(at + place // 16, q, M) + place % 16
            xs = tl.load(
                x + token[:, None] * M[4] + h[None, :],
                mask=(token < T)[:, None] & (h < M[4])[None, :],
                other=0.0,
            )
            weight = tl.reshape(codes.row_weights(tile, row, unit, word, later, q, M), [SUB, BU * 16])
            weight = tl.where((h < M[4])[None, :], weight, 0.0)
            total = _mma(xs, tl.trans(weight), total)
    return total


@jit(varying=("records", "slots", "T"))
def coded_few_rows(
    x, ids, work, partials, records, record_bytes, slots, slot_bytes, tiles_offset, tile_bytes, link, T,
    K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SUB: tl.constexpr,
    NT: tl.constexpr, BU: tl.constexpr, BD: tl.constexpr, TP: tl.constexpr, GATE: tl.constexpr,
    UP: tl.constexpr, DOWN: tl.constexpr, REGIONS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.await_previous(PDL)
    PER: tl.constexpr = W // SUB
    run = tl.program_id(0)
    expert, mine, arrives, source, keep = find_block(
        work, tl.program_id(1), run, records, record_bytes, slots, slot_bytes, NT, PER
    )
    if mine:
        offset = tiles_offset + (run // PER).to(tl.int64) * tile_bytes
        first = (run % PER) * SUB
        due = slow_link.ask(link, arrives, tile_bytes // PER)
        if keep != 0:
            _bring(source, keep, offset, run, first, H, BIAS, REGIONS)
            source = keep
        slow_link.await_bytes(link, due)
        tile = tl.multiple_of((source + offset).to(tl.pointer_type(tl.uint8)), 16)
        row = first + tl.arange(0, SUB)
        token = tl.arange(0, TP)
        g = _products(tile, x, row, token, T, GATE, SUB, BU, TP)
        u = _products(tile, x, row, token, T, UP, SUB, BU, TP)
        if BIAS > 0:
            g += bias_of(tile, BIAS, row)[None, :]
            u += bias_of(tile, BIAS + 4 * W, row)[None, :]
        middle = gate_up(g, u, KIND, ALPHA, LIMIT, OFFSET).to(x.dtype.element_ty)
        pdl.let_next_start(PDL)
        routed, route = routes_of(ids, token, T, expert, K, KP)
        out = partials + (route.to(tl.int64) * NT * PER + run)[:, None] * H
        for h in range(0, H, BD):
            col = h + tl.arange(0, BD)
            weight = tl.reshape(codes.down_weights(tile, first, col, SUB, DOWN), [SUB, BD])
            y = _mma(middle, weight, tl.zeros([TP, BD], tl.float32))
            if BIAS > 0:
                y += bias_of(source.to(tl.pointer_type(tl.uint8)), 0, tl.where(run == 0, col, H), H)[None, :]
            tl.store(out + col[None, :], y, mask=routed[:, None] & (col < H)[None, :])
