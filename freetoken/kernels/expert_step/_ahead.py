"""Triton kernels of what comes before it is asked for: prefetch, and what a prompt leaves behind.

One block chooses what the next layer will miss, or which of a prompt's experts stay, and gives them slots;
a few blocks copy. Prefetch runs beside the attention of the next layer, while the link has nothing to do.
Integers are those of `reference`, bit by bit.
"""

from __future__ import annotations

from freetoken.kernels import _slow_link as slow_link
from freetoken.kernels._triton import constexpr, jit, tl
from freetoken.kernels.expert_step import _rules as rules
from freetoken.kernels.expert_step._look_up import _before, lanes_of, rank_of

SEED_TOKENS, SEED_SHIFT = constexpr(rules.SEED_TOKENS), constexpr(rules.SEED_SHIFT)


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
    RP: tl.constexpr,
    V: tl.constexpr,
    NT: tl.constexpr,
    TWO_SPEED: tl.constexpr,
):
    entry = tl.arange(0, V)
    base = layer * E
    wanted = tl.minimum(tl.load(budget), V)  # a list of V entries holds them, however they lie
    candidate = tl.load(victims + entry)
    owner = tl.load(expert_of + candidate, mask=candidate > 0, other=-1)
    lane, asked = lanes_of(soon, T, E, EP, K, RP)
    gone, used = lanes_of(now, T, E, EP, K, RP)
    keys = tl.load(fast + base + lane, mask=lane < E, other=0)
    if TWO_SPEED:
        keys += tl.load(slow + base + lane, mask=lane < E, other=0)
    slot = tl.maximum(tl.load(slot_of + base + lane, mask=lane < E, other=-1), 0)
    have = tl.load(tiles_in + slot, mask=slot > 0, other=0)

    # What was brought for the layer that has just looked up: was it wanted?
    guess = tl.load(ahead + entry * 4)
    size = tl.load(ahead + entry * 4 + 3) - tl.load(ahead + entry * 4 + 2)
    judged = (guess >= base - E) & (guess < base)
    right = tl.sum(((guess[:, None] == (base - E + gone)[None, :]) & used[None, :]).to(tl.int32), 1) > 0
    judged_before, right_before, brought = tl.load(stats + 9), tl.load(stats + 10), tl.load(stats + 8)
    tl.store(stats + 9, judged_before + tl.sum(tl.where(judged, size, 0)))
    tl.store(stats + 10, right_before + tl.sum(tl.where(judged & right, size, 0)))

    need = tl.where(asked, NT - have, 0)
    before = _before(keys, need > 0, lane)
    first = tl.sum(tl.where(before, need[None, :], 0), 1)
    fill = tl.maximum(0, tl.minimum(need, wanted - first))
    here = (owner[:, None] == (base - E + gone)[None, :]) & used[None, :]
    next_ = (owner[:, None] == (base + lane)[None, :]) & asked[None, :]
    givable = (candidate > 0) & (tl.sum((here | next_).to(tl.int32), 1) == 0)
    cold = tl.zeros_like(candidate) - 1  # any of them goes
    fill = _house(
        keys, before, fill, slot, have, candidate, owner, givable, cold, lane, entry, base,
        slot_of, expert_of, tiles_in, victims, ahead, RP,
    )  # fmt: skip
    tl.store(stats + 8, brought + tl.sum(fill))


@jit
def _house(
    keys, before, fill, slot, have, candidate, owner, givable, cold, lane, entry, base,
    slot_of, expert_of, tiles_in, victims, ahead, RP: tl.constexpr,
):  # fmt: skip
    """Slots for what has none, hottest first, while the coldest victim is colder; the list. Returns fills."""
    homeless = (fill > 0) & (slot == 0)
    number = tl.sum((before & homeless[None, :]).to(tl.int32), 1)
    place = tl.cumsum(givable.to(tl.int32), 0) - 1
    match = (number[:, None] == place[None, :]) & givable[None, :] & homeless[:, None]
    match = match & (cold[None, :] < keys[:, None])
    given = tl.sum(tl.where(match, candidate[None, :], 0), 1)
    evicted = tl.max(tl.where(match, owner[None, :], -1), 1)
    slot = tl.where(homeless, given, slot)
    fill = tl.where(slot > 0, fill, 0)
    arrives = homeless & (given > 0)
    none = tl.zeros_like(lane) - 1
    tl.store(slot_of + evicted, none, mask=arrives & (evicted >= 0))
    tl.debug_barrier()
    tl.store(slot_of + base + lane, slot, mask=arrives)
    tl.store(expert_of + slot, base + lane, mask=arrives)
    tl.store(tiles_in + slot, have + fill, mask=fill > 0)
    taken = tl.sum(match.to(tl.int32), 0) > 0
    tl.store(victims + entry, tl.where(taken, 0, candidate))
    there = fill > 0
    at = rank_of(there, lane, RP)
    tl.store(ahead + entry * 4, tl.zeros_like(entry) - 1, mask=entry >= tl.sum(there.to(tl.int32)))
    tl.store(ahead + at * 4, base + lane, mask=there)
    tl.store(ahead + at * 4 + 1, slot, mask=there)
    tl.store(ahead + at * 4 + 2, have, mask=there)
    tl.store(ahead + at * 4 + 3, have + fill, mask=there)
    return fill


@jit(varying=("layer", "N"))
def seed(
    ids, counts, slow, layer, N, E: tl.constexpr, EP: tl.constexpr, B: tl.constexpr, TWO_SPEED: tl.constexpr
):
    """How often a prompt's last tokens wanted each expert; the slow averages move half the way there."""
    lane, some = tl.arange(0, EP), tl.arange(0, B)
    total = tl.zeros([EP], tl.int32)
    for at in range(0, N, B):
        chosen = tl.load(ids + at + some, mask=at + some < N, other=-1)
        total += tl.sum((chosen[None, :] == lane[:, None]).to(tl.int32), 1)
    tl.store(counts + lane, total, mask=lane < E)
    if TWO_SPEED:
        at = slow + layer * E + lane
        often = tl.load(at, mask=lane < E, other=0)
        moved = often - (often >> 1) + (tl.minimum(total, SEED_TOKENS) << SEED_SHIFT)
        tl.store(at, moved, mask=(lane < E) & (total > 0))


@jit(varying=("layer", "start", "stop", "quota"))
def promote(
    addresses,
    counts,
    words,
    stats,
    slot_of,
    expert_of,
    tiles_in,
    fast,
    slow,
    victims,
    ahead,
    layer,
    start,
    stop,
    quota,
    E: tl.constexpr,
    EP: tl.constexpr,
    V: tl.constexpr,
    NT: tl.constexpr,
    TWO_SPEED: tl.constexpr,
):
    lane, entry = tl.arange(0, EP), tl.arange(0, V)
    base = layer * E
    candidate = tl.load(victims + entry)
    owner = tl.load(expert_of + candidate, mask=candidate > 0, other=-1)
    owned = (candidate > 0) & (owner >= 0)
    recent = tl.load(fast + base + lane, mask=lane < E, other=0)
    cold = tl.load(fast + owner, mask=owned, other=0)
    step, done = tl.load(words), tl.load(stats + 11)
    keys = step + tl.zeros_like(recent)
    if TWO_SPEED:
        keys = recent + tl.load(slow + base + lane, mask=lane < E, other=0)
        cold += tl.load(slow + owner, mask=owned, other=0)
    else:
        cold = tl.where(owner >= base, step, cold)  # this layer's are as recent as can be
    cold = tl.where(owned, cold, -1)
    slot = tl.maximum(tl.load(slot_of + base + lane, mask=lane < E, other=-1), 0)
    have = tl.load(tiles_in + slot, mask=slot > 0, other=0)
    count = tl.load(counts + lane, mask=lane < E, other=0)
    copied = tl.load(addresses + lane, mask=lane < E, other=0) != 0
    hotter = (count[None, :] > count[:, None]) | (
        (count[None, :] == count[:, None]) & (lane[None, :] < lane[:, None])
    )
    wanted = (count > 0) & (tl.sum(hotter.to(tl.int32), 1) < quota)
    fits = copied & (lane >= start) & (lane < stop) & (lane < E) & (have < NT)
    fill = tl.where(fits & (wanted | (slot > 0)), NT - have, 0)
    before = _before(keys, fill > 0, lane)
    fill = tl.where(tl.sum(before.to(tl.int32), 1) < V, fill, 0)  # the list holds no more
    mine = (owner[:, None] == (base + lane)[None, :]) & wanted[None, :]
    givable = (candidate > 0) & (owner < base + stop) & (tl.sum(mine.to(tl.int32), 1) == 0)
    if not TWO_SPEED:
        tl.store(fast + base + lane, step + tl.zeros_like(recent), mask=(fill > 0) & (slot == 0))
    fill = _house(
        keys, before, fill, slot, have, candidate, owner, givable, cold, lane, entry, base,
        slot_of, expert_of, tiles_in, victims, ahead, 0,
    )  # fmt: skip
    tl.store(stats + 11, done + tl.sum(((fill > 0) & (slot == 0)).to(tl.int32)))


@jit(varying=("records", "slots", "base"))
def fetch_ahead(
    ahead,
    addresses,
    records,
    record_bytes,
    slots,
    slot_bytes,
    tiles_offset,
    tile_bytes,
    link,
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
        if addresses is not None:
            there = tl.load(addresses + expert - base)
        source = tl.multiple_of(there.to(tl.pointer_type(tl.int64)), 16)
        home = tl.cast(slots, tl.int64) + slot * slot_bytes
        target = tl.multiple_of(home.to(tl.pointer_type(tl.int64)), 16)
        for at in range(start + tl.program_id(0) * WORDS, end, tl.num_programs(0) * WORDS):
            due = slow_link.ask(link, True, 8 * tl.minimum(WORDS, end - at))
            value = tl.load(source + at + word, mask=at + word < end, other=0, eviction_policy="evict_first")
            tl.store(target + at + word, value, mask=at + word < end)
            slow_link.await_bytes(link, due)
        entry += 1
        expert = tl.load(ahead + entry * 4, mask=entry < V, other=-1)
