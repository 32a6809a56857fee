"""Triton kernels of residency: one block decides a layer-step, one prepares the next one's victims.

Everything about the E experts of a layer is a vector of EP lanes; what depends on an order (fills, list,
victims) is a rank found by comparing all pairs, which is cheaper here than sorting. A few rows have fewer
routes than a layer has experts: their routes are the lanes then, and a warp or two compare them. Integers
are those of `reference`, bit by bit.
"""

from __future__ import annotations

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import INTERPRETED, constexpr, jit, tl
from freetoken.kernels.expert_step import _rules as rules

FAST_AGE, FAST_GAIN = constexpr(rules.FAST_AGE), constexpr(rules.FAST_GAIN)
SLOW_AGE, SLOW_GAIN = constexpr(rules.SLOW_AGE), constexpr(rules.SLOW_GAIN)
AHEAD, HOLE, FLOOR_SHIFT = (constexpr(v) for v in (rules.AHEAD, rules.HOLE, rules.FLOOR_SHIFT))
ONE, INTERPRET = constexpr(rules.ONE), constexpr(INTERPRETED)
LAST, GONE = constexpr(0x7FFFFFFF), constexpr(0x7FFFFFFF << 32)


@jit
def age(words, fast, slow, TOTAL, TWO_SPEED: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    if TWO_SPEED:
        f = tl.load(fast + at, mask=at < TOTAL, other=0)
        s = tl.load(slow + at, mask=at < TOTAL, other=0)
        tl.store(fast + at, f - (f >> FAST_AGE), mask=at < TOTAL)
        tl.store(slow + at, s - (s >> SLOW_AGE), mask=at < TOTAL)
    if tl.program_id(0) == 0:
        tl.store(words, tl.load(words) + 1)


@jit
def lanes_of(ids, T, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, RP: tl.constexpr):
    """(expert of the layer, whether some row wants it) by lane.

    RP > 0: a lane for each route, of which the first to an expert speaks for it; the others are E.
    """
    if RP > 0:
        lane = tl.arange(0, RP)
        route = tl.load(ids + lane, mask=lane < T * K, other=-1)
        again = (route[None, :] == route[:, None]) & (lane[None, :] < lane[:, None])
        used = (route >= 0) & (tl.sum(again.to(tl.int32), 1) == 0)
        lane = tl.where(used, route, E)
    else:
        lane = tl.arange(0, EP)
        present = tl.zeros([EP], tl.int32)
        for row in range(0, T):
            for rank in tl.static_range(K):
                present = tl.where(lane == tl.load(ids + row * K + rank), 1, present)
        used = present > 0
    return lane, used


@jit
def rank_of(some, lane, RP: tl.constexpr):
    """How many of `some` have a lower expert."""
    if RP > 0:
        rank = tl.sum((some[None, :] & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    else:
        rank = tl.cumsum(some.to(tl.int32), 0) - 1  # experts lie in order; counts nothing elsewhere
    return rank


@jit
def _before(keys, asked, lane):
    """[e, f]: asked f comes before e in fill order (hotter first, then lower id)."""
    mine, theirs = keys[:, None], keys[None, :]
    return asked[None, :] & ((theirs > mine) | ((theirs == mine) & (lane[None, :] < lane[:, None])))


@jit
def _tiles_to_fill(words, credit, split, missing, HOST: tl.constexpr):
    filled = missing
    if HOST:
        alpha, beta = tl.load(split), tl.load(split + 1)
        most = missing.to(tl.int64) << 16
        wanted = tl.minimum(most, alpha.to(tl.int64) * missing + beta)
        wanted = tl.maximum(tl.maximum(wanted, 0), most >> FLOOR_SHIFT)
        wanted = tl.where(alpha < 0, 0, wanted)
        due = wanted + credit
        part = tl.maximum(0, tl.minimum(missing.to(tl.int64), due >> 16))
        whole = wanted >= most
        rest = tl.maximum(-ONE, tl.minimum(ONE, due - (part << 16)))
        tl.store(words + 2, tl.where(whole, credit, rest).to(tl.int32))
        filled = tl.where(whole, missing.to(tl.int64), part).to(tl.int32)
    return filled


@jit
def _tell_rows(x, ids, io, T, spec: tl.constexpr):
    """Write what the host needs whatever is decided: on its way while the decision is made."""
    H: tl.constexpr = spec[1]
    ROUTES: tl.constexpr = spec[2]
    K: tl.constexpr = spec[3]
    BX: tl.constexpr = spec[4]
    IDS: tl.constexpr = spec[6]
    X: tl.constexpr = spec[7]
    io = tl.cast(io, tl.int64)  # a low address would be an int32
    route = tl.arange(0, ROUTES)
    own = tl.load(ids + route, mask=route < T * K, other=-1)
    tl.store((io + IDS).to(tl.pointer_type(tl.int32)) + route, own, mask=route < T * K)
    there = tl.multiple_of((io + X).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for at in range(0, T * H, BX):
        some = at + tl.arange(0, BX)
        tl.store(there + some, tl.load(x + some, mask=some < T * H, other=0.0), mask=some < T * H)


@jit
def _ring(words, before, failed, io, left, end, lane, layer, T, RP: tl.constexpr, spec: tl.constexpr):
    """Write the host's part of the layer-step and ring, if there is one; its rows have been told."""
    NT: tl.constexpr = spec[0]
    K: tl.constexpr = spec[3]
    ITEMS: tl.constexpr = spec[5]
    io = tl.cast(io, tl.int64)
    count = tl.sum(left.to(tl.int32))
    sequence = before + 1
    rings = (count > 0) & (failed == 0)
    tl.store(words + 4, tl.where(rings, sequence, 0))
    if rings:
        tl.store(words + 1, sequence)
        at = rank_of(left, lane, RP)
        item = (io + ITEMS).to(tl.pointer_type(tl.int32)) + at * 4
        tl.store(item, lane, mask=left)
        tl.store(item + 1, end, mask=left)
        tl.store(item + 2, NT + tl.zeros_like(lane), mask=left)
        request = (io + 64).to(tl.pointer_type(tl.int32))
        tl.store(request + 1, layer)
        tl.store(request + 2, count)
        tl.store(request + 3, T)
        tl.store(request + 4, K)
        tl.debug_barrier()
        if INTERPRET:
            tl.store(request, sequence)
        else:  # a store, which nobody waits for; an exchange would travel to the host and back
            tl.inline_asm_elementwise(
                "st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0;",
                "=r,l,r",
                [request, sequence],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@jit(varying=("layer", "T"))
def look_up(
    ids,
    x,
    words,
    split,
    stats,
    slot_of,
    expert_of,
    tiles_in,
    fast,
    slow,
    victims,
    work,
    here,
    io,
    layer,
    T,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    RP: tl.constexpr,
    V: tl.constexpr,
    NT: tl.constexpr,
    TWO_SPEED: tl.constexpr,
    HOST: tl.constexpr,
    SPEC: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    base = layer * E
    word = tl.arange(0, 8)
    # Everything is asked for before anything is written: a load can't move across a store, and a warp that
    # is late must not see what another has written.
    counted = tl.load(stats + word)
    step = tl.load(words)
    sequence, credit = tl.load(words + 1), tl.load(words + 2)
    failed, passed = tl.load(words + 3), tl.load(words + 5)
    candidate = tl.load(victims + tl.arange(0, V))
    owner = tl.load(expert_of + candidate, mask=candidate > 0, other=-1)
    lane, used = lanes_of(ids, T, E, EP, K, RP)
    recent = tl.load(fast + base + lane, mask=lane < E, other=0)
    often = recent
    if TWO_SPEED:
        often = tl.load(slow + base + lane, mask=lane < E, other=0)
    slot = tl.maximum(tl.load(slot_of + base + lane, mask=lane < E, other=-1), 0)
    have = tl.load(tiles_in + slot, mask=used & (slot > 0), other=0)

    # Where lanes are fewer than threads, several threads hold a lane: the late ones must have read by now.
    # Measured with 8 warps for 128 experts: after 600 steps a tenth of the slots had two owners.
    tl.debug_barrier()
    keys = step + tl.zeros_like(lane)
    if TWO_SPEED:
        tl.store(fast + base + lane, recent + FAST_GAIN, mask=used)
        tl.store(slow + base + lane, often + SLOW_GAIN, mask=used)
        keys = recent + often + (FAST_GAIN + SLOW_GAIN)
    else:
        tl.store(fast + base + lane, keys, mask=used)
    last = tl.max(tl.where(used, base + lane, -1))
    tl.store(words + 5, tl.where(last < 0, passed, last))

    need = tl.where(used, NT - have, 0)
    missing = tl.sum(need)
    fill = tl.zeros_like(lane)
    arrived = 0
    gone = 0
    if missing > 0:
        if HOST:
            _tell_rows(x, ids, io, T, SPEC)
        asked = need > 0
        wanted = _tiles_to_fill(words, credit, split, missing, HOST)
        before = _before(keys, asked, lane)
        ahead = tl.sum(tl.where(before, need[None, :], 0), 1)
        fill = tl.where(asked, tl.maximum(0, tl.minimum(need, wanted - ahead)), 0)
        homeless = (fill > 0) & (slot == 0)
        number = tl.sum((before & homeless[None, :]).to(tl.int32), 1)
        clash = tl.sum(((owner[:, None] == (base + lane)[None, :]) & used[None, :]).to(tl.int32), 1) > 0
        givable = (candidate > 0) & (clash == 0)
        place = tl.cumsum(givable.to(tl.int32), 0) - 1
        match = (number[:, None] == place[None, :]) & givable[None, :] & homeless[:, None]
        given = tl.sum(tl.where(match, candidate[None, :], 0), 1)
        evicted = tl.max(tl.where(match, owner[None, :], -1), 1)
        slot = tl.where(homeless, given, slot)
        arrives = homeless & (given > 0)
        tl.store(slot_of + evicted, tl.zeros_like(lane) - 1, mask=arrives & (evicted >= 0))
        tl.debug_barrier()
        tl.store(slot_of + base + lane, slot, mask=arrives)
        tl.store(expert_of + slot, base + lane, mask=arrives)
        tl.store(tiles_in + slot, have + fill, mask=used & (slot > 0))
        arrived = tl.sum(arrives.to(tl.int32))
        gone = tl.sum((arrives & (evicted >= 0)).to(tl.int32))
    end = have + fill
    tl.store(here + lane, end, mask=used)

    comes, stays = fill > 0, used & (fill == 0)
    behind = tl.sum(comes.to(tl.int32)) + rank_of(stays, lane, RP)
    at = tl.where(comes, rank_of(comes, lane, RP), behind)
    total = tl.sum(used.to(tl.int32))
    entry = tl.arange(0, EP)
    tl.store(work + entry * 4, tl.zeros_like(entry) - 1, mask=(entry >= total) & (entry < E))
    tl.store(work + at * 4, lane, mask=used)
    tl.store(work + at * 4 + 1, slot, mask=used)
    tl.store(work + at * 4 + 2, have, mask=used)
    tl.store(work + at * 4 + 3, end, mask=used)

    filled = tl.sum(fill)
    misses = tl.sum((need > 0).to(tl.int32))
    counted += tl.where(word == 0, total, 0) + tl.where(word == 1, total - misses, 0)
    counted += tl.where(word == 2, misses, 0) + tl.where(word == 3, missing, 0)
    counted += tl.where(word == 4, filled, 0) + tl.where(word == 5, missing - filled, 0)
    counted += tl.where(word == 6, arrived, 0) + tl.where(word == 7, gone, 0)
    tl.store(stats + word, counted)
    if HOST:
        _ring(words, sequence, failed, io, used & (end < NT), end, lane, layer, T, RP, SPEC)


@jit(varying=("bound",))
def prepare_victims(
    words,
    expert_of,
    tiles_in,
    whole,
    fast,
    slow,
    usable,
    victims,
    bound,
    V: tl.constexpr,
    SP: tl.constexpr,
    TWO_SPEED: tl.constexpr,
):
    slot = tl.arange(0, SP)
    inside = (slot > 0) & (slot < tl.load(usable))
    owner = tl.load(expert_of + slot, mask=inside, other=-1)
    inside = inside & (owner < bound)
    owned = inside & (owner >= 0)
    key = tl.load(fast + owner, mask=owned, other=0)
    if TWO_SPEED:
        key += tl.load(slow + owner, mask=owned, other=0)
        key += tl.where(owner > tl.load(words + 5), key >> AHEAD, 0)
        tiles = tl.load(whole + owner, mask=owned, other=1)
        key = key // (1 + HOLE * (tiles - tl.load(tiles_in + slot, mask=owned, other=1)) // tiles)
    key = tl.where(owned, key, -1)
    key = tl.where(inside, key, LAST)
    both = (key.to(tl.int64) << 32) | slot.to(tl.int64)
    for rank in range(0, V):
        best = tl.min(both)
        found = (best >> 32) < LAST  # what lies outside, or was taken, has the greatest key
        tl.store(victims + rank, tl.where(found, best & 0x7FFFFFFF, 0).to(tl.int32))
        both = tl.where(both == best, GONE, both)
