"""Triton kernels of prefetch: one block chooses what the next layer will miss, a few blocks bring it.

Both run beside the attention of the next layer, while the link has nothing to do. Integers are those of
`reference`, bit by bit.
"""

from __future__ import annotations

from freetoken.kernels._triton import jit, tl
from freetoken.kernels.expert_step._look_up import _before


@jit
def _present(ids, lane, T, K: tl.constexpr):
    """int32 [EP]: which experts of a layer some row wants."""
    present = tl.zeros_like(lane)
    for row in range(0, T):
        for rank in tl.static_range(K):
            present = tl.where(lane == tl.load(ids + row * K + rank), 1, present)
    return present > 0


@jit(varying=("layer", "T"))
def look_ahead(
    now,
    soon,
    stats,
    slot_of,
    expert_of,
    tiles_in,
    fast,
    slow,
    victims,
    ahead,
    budget,
    layer,
    T,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NT: tl.constexpr,
    TWO_SPEED: tl.constexpr,
):
    lane, entry = tl.arange(0, EP), tl.arange(0, V)
    base = layer * E
    wanted = tl.minimum(tl.load(budget), V)  # a list of V entries holds them, however they lie
    candidate = tl.load(victims + entry)
    owner = tl.load(expert_of + candidate, mask=candidate > 0, other=-1)
    keys = tl.load(fast + base + lane, mask=lane < E, other=0)
    if TWO_SPEED:
        keys += tl.load(slow + base + lane, mask=lane < E, other=0)
    slot = tl.maximum(tl.load(slot_of + base + lane, mask=lane < E, other=-1), 0)
    have = tl.load(tiles_in + slot, mask=slot > 0, other=0)
    used = _present(now, lane, T, K)
    asked = _present(soon, lane, T, K)

    # What was brought for the layer that has just looked up: was it wanted?
    guess = tl.load(ahead + entry * 4)
    size = tl.load(ahead + entry * 4 + 3) - tl.load(ahead + entry * 4 + 2)
    judged = (guess >= base - E) & (guess < base)
    right = tl.sum(((guess[:, None] == (base - E + lane)[None, :]) & used[None, :]).to(tl.int32), 1) > 0
    judged_before, right_before, brought = tl.load(stats + 9), tl.load(stats + 10), tl.load(stats + 8)
    tl.store(stats + 9, judged_before + tl.sum(tl.where(judged, size, 0)))
    tl.store(stats + 10, right_before + tl.sum(tl.where(judged & right, size, 0)))

    need = tl.where(asked, NT - have, 0)
    before = _before(keys, need > 0, lane)
    first = tl.sum(tl.where(before, need[None, :], 0), 1)
    fill = tl.maximum(0, tl.minimum(need, wanted - first))
    homeless = (fill > 0) & (slot == 0)
    number = tl.sum((before & homeless[None, :]).to(tl.int32), 1)
    here = (owner[:, None] == (base - E + lane)[None, :]) & used[None, :]
    next_ = (owner[:, None] == (base + lane)[None, :]) & asked[None, :]
    givable = (candidate > 0) & (tl.sum((here | next_).to(tl.int32), 1) == 0)
    place = tl.cumsum(givable.to(tl.int32), 0) - 1
    match = (number[:, None] == place[None, :]) & givable[None, :] & homeless[:, None]
    given = tl.sum(tl.where(match, candidate[None, :], 0), 1)
    evicted = tl.max(tl.where(match, owner[None, :], -1), 1)
    slot = tl.where(homeless, given, slot)
    fill = tl.where(slot > 0, fill, 0)
    tl.store(stats + 8, brought + tl.sum(fill))
    arrives = homeless & (given > 0)
    tl.store(slot_of + evicted, tl.full([EP], -1, tl.int32), mask=arrives & (evicted >= 0))
    tl.debug_barrier()
    tl.store(slot_of + base + lane, slot, mask=arrives)
    tl.store(expert_of + slot, base + lane, mask=arrives)
    tl.store(tiles_in + slot, have + fill, mask=fill > 0)
    taken = tl.sum(match.to(tl.int32), 0) > 0
    tl.store(victims + entry, tl.where(taken, 0, candidate))

    comes = (fill > 0).to(tl.int32)
    at = tl.cumsum(comes, 0) - 1
    tl.store(ahead + entry * 4, tl.full([V], -1, tl.int32), mask=entry >= tl.sum(comes))
    there = (fill > 0) & (at < V)
    tl.store(ahead + at * 4, base + lane, mask=there)
    tl.store(ahead + at * 4 + 1, slot, mask=there)
    tl.store(ahead + at * 4 + 2, have, mask=there)
    tl.store(ahead + at * 4 + 3, have + fill, mask=there)


@jit(varying=("records", "slots", "base"))
def fetch_ahead(
    ahead,
    records,
    record_bytes,
    slots,
    slot_bytes,
    tiles_offset,
    tile_bytes,
    base,
    V: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy the list's tiles, WORDS words of 8 bytes a block and turn; a header travels with tile 0."""
    word = tl.arange(0, WORDS)
    entry = 0
    expert = tl.load(ahead)
    while expert >= 0:
        slot = tl.load(ahead + entry * 4 + 1).to(tl.int64)
        first, last = tl.load(ahead + entry * 4 + 2), tl.load(ahead + entry * 4 + 3)
        start = tl.where(first == 0, 0, tiles_offset + first.to(tl.int64) * tile_bytes) // 8
        end = (tiles_offset + last.to(tl.int64) * tile_bytes) // 8
        there = tl.cast(records, tl.int64) + (expert - base).to(tl.int64) * record_bytes
        source = tl.multiple_of(there.to(tl.pointer_type(tl.int64)), 16)
        home = tl.cast(slots, tl.int64) + slot * slot_bytes
        target = tl.multiple_of(home.to(tl.pointer_type(tl.int64)), 16)
        for at in range(start + tl.program_id(0) * WORDS, end, tl.num_programs(0) * WORDS):
            value = tl.load(source + at + word, mask=at + word < end, other=0, eviction_policy="evict_first")
            tl.store(target + at + word, value, mask=at + word < end)
        entry += 1
        expert = tl.load(ahead + entry * 4, mask=entry < V, other=-1)
