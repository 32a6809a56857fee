"""A draw of the k <= MOST_KEPT largest logits.

The k groups with the largest members hold them: each of these groups has a member before any that lies
elsewhere. The k-th largest of the groups' and then of their members' numbers is searched for bit by bit, and
each of the k learns from all others what comes before it, so nothing is sorted. Weights are whole numbers,
since small cards are slow in float64.
"""

from __future__ import annotations

from freetoken.kernels._triton import jit, tl
from freetoken.kernels.sample._numbers import (
    KEPT,
    MIN_P,
    MOST_KEPT,
    NOTHING,
    TEMPERATURE,
    TOP_P,
    U,
    rank_of,
    read,
    real,
    units_of,
    weight_of,
)


@jit
def take_largest(ranks, count):
    """int32 0 or 1: the `count` largest, first ones among equals; padding ranks NOTHING."""
    border = tl.where(tl.sum((ranks >= 0).to(tl.int32), 0) >= count, 0, NOTHING)
    for bit in range(31):
        higher = border + (1 << (30 - bit))
        border = tl.where(tl.sum((ranks >= higher).to(tl.int32), 0) >= count, higher, border)
    above, equal = (ranks > border).to(tl.int32), (ranks == border).to(tl.int32)
    room = count - tl.sum(above, 0)
    return above | (equal & (tl.cumsum(equal, 0) <= room).to(tl.int32))


@jit
def draw_few(row, asked, numbers, marks, top, V: tl.constexpr, GROUP: tl.constexpr):
    """A token of the largest ones; numbers: the groups' largest, then room, as at marks for two lists."""
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    WIDE: tl.constexpr = 1 << (max(GROUPS, 32) - 1).bit_length()
    kept = tl.load(asked + KEPT).to(tl.int32)
    group = tl.arange(0, WIDE)
    tops = tl.load(numbers + group, mask=group < GROUPS, other=float("-inf"))
    groups = tl.minimum(kept, GROUPS)
    taken = take_largest(tl.where(group < GROUPS, rank_of(tops), NOTHING), groups)
    tl.store(marks + tl.cumsum(taken, 0) - 1, group, mask=taken == 1)
    tl.debug_barrier()
    lane = tl.arange(0, MOST_KEPT * GROUP)
    at = tl.load(marks + lane // GROUP, mask=lane // GROUP < groups, other=V) * GROUP + lane % GROUP
    x = read(row, at, at < V)
    taken = take_largest(tl.where(at < V, rank_of(x), NOTHING), kept)
    slot = tl.cumsum(taken, 0) - 1
    tl.store(numbers + GROUPS + slot, x, mask=taken == 1)
    tl.store(marks + MOST_KEPT + slot, at, mask=taken == 1)
    tl.debug_barrier()
    one = tl.arange(0, MOST_KEPT)
    value = tl.load(numbers + GROUPS + one, mask=one < kept, other=float("-inf"))
    token = tl.load(marks + MOST_KEPT + one, mask=one < kept, other=0)
    temperature = real(asked, TEMPERATURE).to(tl.float32)
    weight, units = weight_of(value, top, temperature), units_of(value, top, temperature)
    # They lie in the order of their ids: the first comes first among equals.
    larger = value[None, :] > value[:, None]
    sooner = larger | ((value[None, :] == value[:, None]) & (one[None, :] < one[:, None]))
    order = tl.sum(sooner.to(tl.int32), 1)
    before = tl.sum(tl.where(sooner, units[None, :], 0), 1)
    keep = before < real(asked, TOP_P) * tl.sum(units, 0).to(tl.float64)
    keep &= weight >= real(asked, MIN_P) * tl.max(weight, 0).to(tl.float64)
    keep = (keep & (units > 0)) | (order == 0)
    goal = real(asked, U) * tl.sum(tl.where(keep, units, 0), 0).to(tl.float64)
    past = tl.min(tl.where(keep & (before + units > goal), order, MOST_KEPT), 0)
    chosen = tl.minimum(past, tl.max(tl.where(keep, order, 0), 0))
    return tl.sum(tl.where(order == chosen, token, 0), 0)
