"""A draw of any limited number of tokens: top-p or min-p without a small top-k, or a large top-k.

    weigh      a block for each BLOCK logits: how many lie within each of STEPS distances from the largest,
               and their weights
    draw_many  one block: lists the logits within the least distance that holds all that is kept, if there are
               LISTED of them at most; else it goes through the whole row instead

What is kept and what is drawn are runs of one order, from the largest logit on, equal ones by their ids. So
each limit is a mass, the least one counts, and the token is the first up to which more than u of it lie. A
mass is turned into a logit by a search for its rank, bit by bit. Weights are whole numbers: their sums are
exact, in any order.
"""

from __future__ import annotations

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import constexpr, jit, tl
from freetoken.kernels.sample._numbers import (
    KEPT,
    KIND,
    MANY,
    MIN_P,
    MOST_KEPT,
    NOTHING,
    TEMPERATURE,
    TOP_P,
    WORDS,
    U,
    rank_of,
    read,
    real,
    units_of,
    weight_of,
    where_of,
)

STEPS, LISTED = constexpr(16), constexpr(4096)
PASS = constexpr(2048)


@jit
def distance(x, top, temperature):
    """Of a logit below the largest one, in units of the temperature."""
    return (tl.where(top == float("-inf"), 0.0, top) - x) / temperature


@jit
def weigh(
    logits,
    asked,
    numbers,
    masses,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    VECTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    """masses int64 [STEPS, 2, blocks]: weights and numbers of logits within 1, 2, ... and any distance."""
    pdl.await_previous(PDL)
    pdl.let_next_start(PDL)
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    WIDE: tl.constexpr = 1 << (max(BLOCKS, 32) - 1).bit_length()
    block, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    asked += entry * WORDS
    if tl.load(asked + KIND) == MANY:
        lane = tl.arange(0, WIDE)
        numbers += entry * (2 * BLOCKS + GROUPS + MOST_KEPT)
        top = tl.max(tl.load(numbers + lane, mask=lane < BLOCKS, other=float("-inf")), 0)
        temperature = real(asked, TEMPERATURE).to(tl.float32)
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = read(where_of(logits, asked, V, VECTORS), at, at < V)
        units, far = units_of(x, top, temperature), distance(x, top, temperature)
        masses += entry * (2 * STEPS * BLOCKS) + block
        for step in range(STEPS):
            near = (at < V) & ((far <= step + 1.0) | (step == STEPS - 1))
            tl.store(masses + 2 * step * BLOCKS, tl.sum(tl.where(near, units, 0), 0))
            tl.store(masses + (2 * step + 1) * BLOCKS, tl.sum(near.to(tl.int32), 0).to(tl.int64))


@jit
def amount(base, count, least, border, top, temperature, BY_NUMBER: tl.constexpr):
    """int64: of logits whose rank is `border` or more and whose weight is `least` or more."""
    total = tl.zeros([], tl.int64)
    for start in range(0, count, PASS):
        at = start + tl.arange(0, PASS)
        x = read(base, at, at < count)
        inside = (at < count) & (rank_of(x) >= border)
        if BY_NUMBER:
            units = tl.full([PASS], 1, tl.int64)
        else:
            inside &= weight_of(x, top, temperature) >= least
            units = units_of(x, top, temperature)
        total += tl.sum(tl.where(inside, units, 0), 0)
    return total


@jit
def border_of(base, count, goal, top, temperature, BY_NUMBER: tl.constexpr):
    """The highest rank from which on there is as much as `goal`, or NOTHING; what lies above it."""
    found, above = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    bit = tl.full([], NOTHING, tl.int32)
    for _ in range(32):
        tried = found | bit  # ranks with their sign turned round count up from 0
        there = amount(base, count, 0.0, tried ^ NOTHING, top, temperature, BY_NUMBER)
        found = tl.where(there >= goal, tried, found)
        above = tl.where(there >= goal, above, there)
        bit = (bit >> 1) & 0x7FFFFFFF
    return found ^ NOTHING, above


@jit
def unit_at(rank, top, temperature):
    """The weight of the logits of a rank: 0 where it is too small for a unit."""
    bits = tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    x = bits.to(tl.float32, bitcast=True)
    return units_of(tl.where(x < float("inf"), x, float("-inf")), top, temperature)


@jit
def times(goal, unit):
    """The least int64 number of units that reaches `goal`; a division of whole numbers would cost a stack."""
    unit = tl.maximum(unit, 1)
    near = (goal.to(tl.float64) / unit.to(tl.float64)).to(tl.int64)
    near -= ((near - 1) * unit >= goal).to(tl.int64)
    return near + (near * unit < goal).to(tl.int64)


@jit
def list_near(row, values, ids, reach, top, temperature, V: tl.constexpr):
    """Write down the logits within `reach` of the largest one, in the order of their ids. How many?"""
    offset = tl.zeros([], tl.int32)
    for start in range(0, V, PASS):
        at = start + tl.arange(0, PASS)
        x = read(row, at, at < V)
        near = ((at < V) & (distance(x, top, temperature) <= reach)).to(tl.int32)
        slot = offset + tl.cumsum(near, 0) - 1
        tl.store(values + slot, x, mask=(near == 1) & (slot < LISTED))
        tl.store(ids + slot, at, mask=(near == 1) & (slot < LISTED))
        offset += tl.sum(near, 0)
    tl.debug_barrier()
    return tl.minimum(offset, LISTED)


@jit
def draw_many(row, asked, masses, values, ids, top, V: tl.constexpr, BLOCKS: tl.constexpr):
    WIDE: tl.constexpr = 1 << (max(BLOCKS, 32) - 1).bit_length()
    temperature = real(asked, TEMPERATURE).to(tl.float32)
    kept, top_p, min_p = tl.load(asked + KEPT), real(asked, TOP_P), real(asked, MIN_P)
    step, lane = tl.arange(0, STEPS), tl.arange(0, WIDE)
    at = masses + 2 * step[:, None] * BLOCKS + lane[None, :]
    there = (lane < BLOCKS)[None, :] & (step >= 0)[:, None]
    mass = tl.sum(tl.load(at, mask=there, other=0), 1)
    number = tl.sum(tl.load(at + BLOCKS, mask=there, other=0), 1)
    whole = tl.max(mass, 0)

    wanted = tl.minimum(tl.ceil(top_p * whole.to(tl.float64)).to(tl.int64), whole)
    below = tl.exp(-(step + 1.0)) < min_p.to(tl.float32)
    enough = tl.where(kept < V, number >= kept, (mass >= wanted) | below) | (step == STEPS - 1)
    chosen = tl.min(tl.where(enough, step, STEPS), 0)
    count = tl.sum(tl.where(step == chosen, number, 0), 0).to(tl.int32)
    listed = count <= LISTED
    base, reach = row.to(tl.int64), tl.where(chosen == STEPS - 1, float("inf"), chosen + 1.0)
    if listed:
        count = list_near(row, values, ids, reach, top, temperature, V)
        base = values.to(tl.int64)
    else:
        count = tl.full([], V, tl.int32)
    base = base.to(tl.pointer_type(tl.float32))

    if kept < V:
        border, above = border_of(base, count, kept, top, temperature, True)
        whole = amount(base, count, 0.0, border + 1, top, temperature, False)
        whole += (kept - above) * unit_at(border, top, temperature)
    left = whole
    if top_p < 1:
        wanted = tl.maximum(tl.ceil(top_p * whole.to(tl.float64)).to(tl.int64), 1)
        border, above = border_of(base, count, wanted, top, temperature, False)
        unit = unit_at(border, top, temperature)
        left = tl.minimum(left, above + times(wanted - above, unit) * unit)
    if min_p > 0:
        least = tl.minimum(min_p.to(tl.float32), 1.0)
        left = tl.minimum(left, amount(base, count, least, NOTHING, top, temperature, False))
    goal = tl.minimum((real(asked, U) * left.to(tl.float64)).to(tl.int64) + 1, left)
    border, above = border_of(base, count, goal, top, temperature, False)
    unit = unit_at(border, top, temperature)
    place = find(base, count, border, times(goal - above, unit))
    return tl.where(listed, tl.load(ids + place, mask=listed, other=0), place)


@jit
def find(base, count, rank, which):
    """Where the logit number `which`, from 1 on, of a rank lies."""
    place, seen = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for start in range(0, count, PASS):
        at = start + tl.arange(0, PASS)
        equal = ((at < count) & (rank_of(read(base, at, at < count)) == rank)).to(tl.int64)
        hit = (equal == 1) & (seen + tl.cumsum(equal, 0) == which)
        place = tl.maximum(place, tl.max(tl.where(hit, at, 0), 0))
        seen += tl.sum(equal, 0)
    return place
