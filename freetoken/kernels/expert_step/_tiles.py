"""Triton kernels of the arithmetic: tiles of records into partial outputs, partial outputs into rows.

A block owns a run of SUB columns of one expert's I. It reads them from the expert's slot, or, if they are
arriving, from host memory, and then stores what it read into the slot on the way: a fill costs no launch,
no second read and nobody waits for it. Partials are float32 per route and run; `combine` adds them in one
order, so results don't depend on who was resident.
"""

from __future__ import annotations

from freetoken.kernels import _pdl as pdl
from freetoken.kernels import _slow_link as slow_link
from freetoken.kernels._codes import copy_bytes
from freetoken.kernels._gate import gate_up
from freetoken.kernels._triton import INTERPRETED, constexpr, jit, tl

INTERPRET = constexpr(INTERPRETED)
MOST_POLLS = constexpr(1_000_000)


@jit
def _typed(address, kind: tl.constexpr):
    """An address as a pointer. Without the promise loads are two bytes wide (measured: half the speed)."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@jit
def find_block(
    work, entry, run, records, record_bytes, slots, slot_bytes, NT: tl.constexpr, PER: tl.constexpr
):
    """(expert, computes here, arrives, where it is read, where it is kept or 0) of a block."""
    expert = tl.load(work + entry * 4)
    slot = tl.load(work + entry * 4 + 1)
    have = tl.load(work + entry * 4 + 2)
    end = tl.load(work + entry * 4 + 3)
    tile = run // PER
    mine = (expert >= 0) & (tile < end)
    arrives = tile >= have
    there = tl.cast(records, tl.int64) + expert.to(tl.int64) * record_bytes
    home = tl.cast(slots, tl.int64) + slot.to(tl.int64) * slot_bytes
    return expert, mine, arrives, tl.where(arrives, there, home), tl.where(arrives & (slot > 0), home, 0)


@jit
def wants(ids, row, expert, K: tl.constexpr, KP: tl.constexpr):
    """bool [KP]: which of a row's routes go to an expert, one at most."""
    rank = tl.arange(0, KP)
    return tl.load(ids + row * K + rank, mask=rank < K, other=-1) == expert


@jit
def route_of(match, row, K: tl.constexpr, KP: tl.constexpr):
    """The number of the route that `match` names."""
    return row * K + tl.sum(tl.where(match, tl.arange(0, KP), 0))


@jit
def routes_of(ids, token, T, expert, K: tl.constexpr, KP: tl.constexpr):
    """Of rows below T: which are routed to an expert, and the numbers of these routes."""
    rank = tl.arange(0, KP)
    theirs = tl.load(
        ids + token[:, None] * K + rank[None, :],
        mask=(token < T)[:, None] & (rank < K)[None, :],
        other=-1,
    )
    match = theirs == expert
    return tl.sum(match.to(tl.int32), 1) > 0, token * K + tl.sum(tl.where(match, rank[None, :], 0), 1)


@jit
def bias_of(tile, AT: tl.constexpr, place, COUNT: tl.constexpr = 1 << 30):
    """float32 numbers `place` of those at byte AT of a tile or record; 0 from COUNT on."""
    base = (tile + AT).to(tl.pointer_type(tl.float32))
    return tl.load(base + place, mask=place < COUNT, other=0.0)


@jit
def _bring_biases(
    source, keep, offset, run, first,
    H: tl.constexpr, W: tl.constexpr, SUB: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Copy a run's biases to its slot; whoever takes the first run brings down's."""
    there = source + offset + BIAS + first * 4
    home = keep + offset + BIAS + first * 4
    copy_bytes(there, home, 4 * SUB, 4, 1024)
    copy_bytes(there + 4 * W, home + 4 * W, 4 * SUB, 4, 1024)
    if run == 0:
        copy_bytes(source, keep, 4 * H, 4, 8192)


@jit
def _first_half(
    x, base, copy, kept, row, H: tl.constexpr, W: tl.constexpr, SUB: tl.constexpr, BH: tl.constexpr
):
    """gate x and up x of SUB columns; the next piece is on its way before the last one is used."""
    col = tl.arange(0, BH)
    gate = row[:, None] * H + col[None, :]
    up = gate + W * H
    g = tl.zeros([SUB, BH], tl.float32)
    u = tl.zeros([SUB, BH], tl.float32)
    inside = (col < H)[None, :] & (row >= 0)[:, None]
    next_g = tl.load(base + gate, mask=inside, other=0.0, eviction_policy="evict_first")
    next_u = tl.load(base + up, mask=inside, other=0.0, eviction_policy="evict_first")
    for h in range(0, H, BH):
        gw = next_g
        uw = next_u
        inside = (h + col < H)[None, :] & (row >= 0)[:, None]
        ahead = (h + BH + col < H)[None, :] & (row >= 0)[:, None]
        next_g = tl.load(base + gate + (h + BH), mask=ahead, other=0.0, eviction_policy="evict_first")
        next_u = tl.load(base + up + (h + BH), mask=ahead, other=0.0, eviction_policy="evict_first")
        tl.store(copy + gate + h, gw, mask=inside & kept)
        tl.store(copy + up + h, uw, mask=inside & kept)
        xv = tl.load(x + h + col, mask=h + col < H, other=0.0).to(tl.float32)[None, :]
        g += gw.to(tl.float32) * xv
        u += uw.to(tl.float32) * xv
    return g, u


@jit(varying=("records", "slots", "T"))
def vector_rows(
    x,
    ids,
    work,
    partials,
    records,
    record_bytes,
    slots,
    slot_bytes,
    tiles_offset,
    tile_bytes,
    link,
    T,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SUB: tl.constexpr,
    NT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.await_previous(PDL)
    PER: tl.constexpr = W // SUB
    run = tl.program_id(0)
    expert, mine, arrives, source, keep = find_block(
        work, tl.program_id(1), run, records, record_bytes, slots, slot_bytes, NT, PER
    )
    if mine:
        due = slow_link.ask(link, arrives, tile_bytes // PER)
        kept = keep != 0
        offset = tiles_offset + (run // PER).to(tl.int64) * tile_bytes
        row = (run % PER) * SUB + tl.arange(0, SUB)
        col = tl.arange(0, BD)
        down = 2 * W * H + row[:, None] * H + col[None, :]
        copy = _typed(tl.where(kept, keep, source) + offset, x.dtype.element_ty)
        raw = source.to(tl.pointer_type(tl.uint8))
        if BIAS > 0:  # noqa: SIM102 - decided while compiling
            if kept:
                _bring_biases(source, keep, offset, run, (run % PER) * SUB, H, W, SUB, BIAS)
        for token in range(0, T):
            match = wants(ids, token, expert, K, KP)
            if tl.sum(match.to(tl.int32)) > 0:
                base = _typed(source + offset, x.dtype.element_ty)
                g, u = _first_half(x + token * H, base, copy, kept, row, H, W, SUB, BH)
                pdl.let_next_start(PDL)
                inside = (col < H)[None, :] & (row >= 0)[:, None]
                next_d = tl.load(base + down, mask=inside, other=0.0, eviction_policy="evict_first")
                g = tl.sum(g, 1)
                u = tl.sum(u, 1)
                if BIAS > 0:
                    g += bias_of(raw + offset, BIAS, row)
                    u += bias_of(raw + offset, BIAS + 4 * W, row)
                middle = gate_up(g, u, KIND, ALPHA, LIMIT, OFFSET).to(x.dtype.element_ty).to(tl.float32)
                route = route_of(match, token, K, KP)
                out = partials + (route.to(tl.int64) * NT * PER + run) * H
                for h in range(0, H, BD):
                    dw = next_d
                    inside = (h + col < H)[None, :] & (row >= 0)[:, None]
                    ahead = (h + BD + col < H)[None, :] & (row >= 0)[:, None]
                    next_d = tl.load(
                        base + down + (h + BD), mask=ahead, other=0.0, eviction_policy="evict_first"
                    )
                    tl.store(copy + down + h, dw, mask=inside & kept)
                    y = tl.sum(dw.to(tl.float32) * middle[:, None], 0)
                    if BIAS > 0:
                        y += bias_of(raw, 0, tl.where(run == 0, h + col, H), H)
                    tl.store(out + h + col, y, mask=h + col < H)
                # What arrived is kept now: another row reads it from the slot.
                tl.debug_barrier()
                source = tl.where(kept, keep, source)
                kept = False
        slow_link.await_bytes(link, due)


@jit(varying=("records", "slots", "T"))
def few_rows(
    x,
    ids,
    work,
    partials,
    records,
    record_bytes,
    slots,
    slot_bytes,
    tiles_offset,
    tile_bytes,
    link,
    T,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SUB: tl.constexpr,
    NT: tl.constexpr,
    BH: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
    TP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.await_previous(PDL)
    PER: tl.constexpr = W // SUB
    run = tl.program_id(0)
    expert, mine, arrives, source, keep = find_block(
        work, tl.program_id(1), run, records, record_bytes, slots, slot_bytes, NT, PER
    )
    if mine:
        due = slow_link.ask(link, arrives, tile_bytes // PER)
        kept = keep != 0
        offset = tiles_offset + (run // PER).to(tl.int64) * tile_bytes
        base = _typed(source + offset, x.dtype.element_ty)
        copy = _typed(tl.where(kept, keep, source) + offset, x.dtype.element_ty)
        row = (run % PER) * SUB + tl.arange(0, SUB)
        col = tl.arange(0, BH)
        token = tl.arange(0, TP)
        gate = row[:, None] * H + col[None, :]
        up = gate + W * H
        g = tl.zeros([TP, SUB], tl.float32)
        u = tl.zeros([TP, SUB], tl.float32)
        for h in tl.range(0, H, BH, num_stages=STAGES):
            inside = (h + col < H)[None, :] & (row >= 0)[:, None]
            xs = tl.load(
                x + token[:, None] * H + h + col[None, :],
                mask=(token < T)[:, None] & (h + col < H)[None, :],
                other=0.0,
            )
            gw = tl.load(base + gate + h, mask=inside, other=0.0, eviction_policy="evict_first")
            uw = tl.load(base + up + h, mask=inside, other=0.0, eviction_policy="evict_first")
            tl.store(copy + gate + h, gw, mask=inside & kept)
            tl.store(copy + up + h, uw, mask=inside & kept)
            if INTERPRET:
                g += tl.dot(xs.to(tl.float32), tl.trans(gw).to(tl.float32))
                u += tl.dot(xs.to(tl.float32), tl.trans(uw).to(tl.float32))
            else:
                g = tl.dot(xs, tl.trans(gw), g)
                u = tl.dot(xs, tl.trans(uw), u)
        pdl.let_next_start(PDL)
        raw = source.to(tl.pointer_type(tl.uint8))
        if BIAS > 0:  # noqa: SIM102 - decided while compiling
            if kept:
                _bring_biases(source, keep, offset, run, (run % PER) * SUB, H, W, SUB, BIAS)
            g += bias_of(raw + offset, BIAS, row)[None, :]
            u += bias_of(raw + offset, BIAS + 4 * W, row)[None, :]
        middle = gate_up(g, u, KIND, ALPHA, LIMIT, OFFSET).to(x.dtype.element_ty)
        routed, route = routes_of(ids, token, T, expert, K, KP)
        out = partials + (route.to(tl.int64) * NT * PER + run)[:, None] * H
        for h in tl.range(0, H, BH, num_stages=STAGES):
            inside = (h + col < H)[None, :] & (row >= 0)[:, None]
            dw = tl.load(base + 2 * W * H + gate + h, mask=inside, other=0.0, eviction_policy="evict_first")
            tl.store(copy + 2 * W * H + gate + h, dw, mask=inside & kept)
            y = tl.dot(middle.to(tl.float32), dw.to(tl.float32)) if INTERPRET else tl.dot(middle, dw)
            if BIAS > 0:
                y += bias_of(raw, 0, tl.where(run == 0, h + col, H), H)[None, :]
            tl.store(out + (h + col)[None, :], y, mask=routed[:, None] & (h + col < H)[None, :])
        slow_link.await_bytes(link, due)


@jit
def wait(words, io, PDL: tl.constexpr):
    """Until the host has answered; gives up after about a second, then everyone does.

    One warp of one block asks: as many as add would keep the link so busy that the answer comes late
    (measured: 0.4 ms a layer).
    """
    pdl.await_previous(PDL)
    pending = tl.load(words + 4)
    if (pending != 0) & (tl.load(words + 3) == 0):
        reply = (tl.cast(io, tl.int64) + 128).to(tl.pointer_type(tl.int32))
        polls = 0
        done = tl.load(reply, volatile=True)
        while (done < pending) & (polls < MOST_POLLS):
            done = tl.load(reply, volatile=True)
            polls += 1
        if done < pending:
            tl.store(words + 3, 1)
            tl.store((tl.cast(io, tl.int64) + 192).to(tl.pointer_type(tl.int32)), 1)


@jit(varying=("T",))
def combine(
    ids,
    weights,
    partials,
    here,
    io,
    residual,
    out,
    T,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    NT: tl.constexpr,
    PER: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    HOST: tl.constexpr,
    OUT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    rank = tl.arange(0, KP)
    expert = tl.load(ids + row * K + rank, mask=rank < K, other=-1)
    live = expert >= 0
    weight = tl.load(weights + row * K + rank, mask=live, other=0.0)
    end = tl.load(here + expert, mask=live, other=0) * PER
    # The router and the look-up were over before the kernel of the tiles let this one in.
    pdl.await_previous(PDL)
    route = (row * K + rank).to(tl.int64)
    value = tl.zeros([KP, BC], tl.float32)
    for first in range(0, NT * PER, BR):
        run = first + tl.arange(0, BR)
        part = tl.load(
            partials + (route[:, None] * NT * PER + run[None, :])[:, :, None] * H + col[None, None, :],
            mask=(run[None, :] < end[:, None])[:, :, None] & (col < H)[None, None, :],
            other=0.0,
        )
        value += tl.sum(part, 1)
    theirs = tl.zeros([KP, BC], tl.float32)
    if HOST:
        at = (tl.cast(io, tl.int64) + OUT).to(tl.pointer_type(tl.float32))
        left = (live & (end < NT * PER))[:, None] & (col < H)[None, :]
        theirs = tl.load(at + route[:, None] * H + col[None, :], mask=left, other=0.0, volatile=True)
    # Not before all has been asked for: the next product's weights would fill the way here.
    pdl.let_next_start(PDL)
    value = (value + theirs) * weight[:, None]
    total = tl.zeros([BC], tl.float32)
    for k in tl.static_range(K):  # one after the other, in ascending expert id
        total += tl.sum(tl.where((rank == k)[:, None], value, 0.0), 0)
    if residual is not None:
        kind = residual.dtype.element_ty
        before = tl.load(residual + row * H + col, mask=col < H, other=0.0)
        total = before.to(tl.float32) + total.to(kind).to(tl.float32)
    tl.store(out + row * H + col, total.to(out.dtype.element_ty), mask=col < H)
