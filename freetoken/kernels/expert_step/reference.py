"""The layer-step in numpy and torch: the oracle of the device's kernels, bit-equal in its integers."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import torch
from torch import Tensor

from freetoken.core.codes import Coded
from freetoken.kernels.activation import gated
from freetoken.kernels.expand_records.reference import matrix_of
from freetoken.kernels.expert_step import _rules as rules
from freetoken.kernels.expert_step._types import (
    AHEAD,
    CREDIT,
    EVICTIONS,
    FAILED,
    JUDGED,
    PASSED,
    PENDING,
    PROMOTED,
    RIGHT,
    SEQUENCE,
    STEP,
    Call,
    Place,
    Table,
)

RANK = 0


def supports(device_type: str) -> bool:
    return True


def num_runs(num_tiles: int, tile_width: int) -> int:
    return num_tiles


def age(table: Table) -> None:
    table.words[STEP] += 1
    if table.policy == "two_speed":
        table.fast.sub_(table.fast >> rules.FAST_AGE)
        table.slow.sub_(table.slow >> rules.SLOW_AGE)


def _keys(table: Table) -> np.ndarray:
    keys: np.ndarray = table.fast.numpy().astype(np.int64)
    if table.policy == "two_speed":
        keys = keys + table.slow.numpy()
    return keys


def look_up(table: Table, place: Place, call: Call) -> None:
    base, nt = place.layer * place.num_experts, place.num_tiles
    words, stats = table.words.numpy(), table.stats.numpy()
    slot_of, expert_of, tiles_in = table.slot_of.numpy(), table.expert_of.numpy(), table.tiles_in.numpy()
    local = np.unique(call.ids.numpy())
    local = local[local >= 0].astype(np.int64)
    experts = base + local
    slots = np.maximum(slot_of[experts], 0)
    have = np.where(slots > 0, tiles_in[slots], 0)
    fast, slow = table.fast.numpy(), table.slow.numpy()
    if table.policy == "two_speed":
        fast[experts] += rules.FAST_GAIN
        slow[experts] += rules.SLOW_GAIN
    else:
        fast[experts] = words[STEP]
    words[PASSED] = experts[-1] if len(experts) else words[PASSED]
    need = nt - have
    total = int(need.sum())
    wanted = _tiles_to_fill(table, call, total)
    order = sorted(range(len(local)), key=lambda m: (-_keys(table)[experts[m]], m))
    fill, left = np.zeros(len(local), np.int64), wanted
    for m in order:
        fill[m] = min(need[m], left)
        left -= fill[m]
    givable = [s for s in table.victims.tolist() if s > 0 and expert_of[s] not in set(experts.tolist())]
    arrived = 0
    for m in order:
        if fill[m] and not slots[m] and givable:
            slots[m] = givable.pop(0)
            arrived += 1
            if expert_of[slots[m]] >= 0:
                slot_of[expert_of[slots[m]]] = -1
                stats[EVICTIONS] += 1
            expert_of[slots[m]], slot_of[experts[m]] = experts[m], slots[m]
        if slots[m]:
            tiles_in[slots[m]] = have[m] + fill[m]
    _list(table, local, slots, have, have + fill)
    filled = int(fill.sum())
    hits, misses = int((need == 0).sum()), int((need > 0).sum())
    counted = (len(local), hits, misses, total, filled, total - filled, arrived)
    stats[: len(counted)] += counted
    _ring(table, place, call, local, have + fill)


def _tiles_to_fill(table: Table, call: Call, missing: int) -> int:
    """Q, as `experts.split.Split.tiles_to_fill` has it."""
    if call.io is None:
        return missing
    words = table.words.numpy()
    alpha, beta = (int(v) for v in table.split[call.bucket])
    most = missing << 16
    wanted = max(0, min(most, alpha * missing + beta))
    wanted = max(wanted, most >> rules.FLOOR_SHIFT)
    if alpha < 0:
        wanted = 0  # the host does everything
    if wanted >= most:
        return missing
    due = wanted + int(words[CREDIT])
    filled = max(0, min(missing, due >> 16))
    words[CREDIT] = max(-rules.ONE, min(rules.ONE, due - (filled << 16)))
    return filled


def _list(table: Table, local: np.ndarray, slots: np.ndarray, have: np.ndarray, end: np.ndarray) -> None:
    """Arriving experts first: they take longest."""
    work, here = table.work.numpy(), table.here.numpy()
    work[:, 0] = -1
    order = np.argsort(end == have, kind="stable")
    for row, m in enumerate(order):
        work[row] = local[m], slots[m], have[m], end[m]
    here[local] = end


def _ring(table: Table, place: Place, call: Call, local: np.ndarray, end: np.ndarray) -> None:
    words, left = table.words.numpy(), end < place.num_tiles
    words[PENDING] = 0
    if not left.any():
        return
    io, (rows, top_k) = call.io, call.ids.shape
    words[SEQUENCE] += 1
    words[PENDING] = words[SEQUENCE]
    items = [(e, a, place.num_tiles, 0) for e, a in zip(local[left], end[left], strict=True)]
    io.items[: len(items)] = torch.tensor(np.array(items, np.int32))
    io.ids.view(-1)[: rows * top_k] = call.ids.reshape(-1)
    io.x[:rows] = call.x
    head = [int(words[SEQUENCE]), place.layer, len(items), rows, top_k]
    io.request[:5] = torch.tensor(head, dtype=torch.int32)


def prepare_victims(table: Table, bound: int) -> None:
    usable = int(table.usable[0])
    owner = table.expert_of.numpy()[1:usable].astype(np.int64)
    keys = np.where(owner >= 0, _keys(table)[np.maximum(owner, 0)], -1)
    if table.policy == "two_speed":
        ahead = owner > int(table.words[PASSED])
        keys = keys + np.where(ahead & (owner >= 0), keys >> rules.AHEAD, 0)
        whole = table.whole.numpy()[np.maximum(owner, 0)].astype(np.int64)
        lacks = whole - table.tiles_in.numpy()[1:usable]
        keys = np.where(owner >= 0, keys // (1 + rules.HOLE * lacks // whole), -1)
    order = np.lexsort((np.arange(len(keys)), keys))
    best = order[owner[order] < bound][: len(table.victims)]
    table.victims.zero_()
    table.victims[: len(best)] = torch.from_numpy(best + 1).int()


def look_ahead(table: Table, place: Place, now: Tensor, soon: Tensor) -> None:
    base, stats, victims = place.layer * place.num_experts, table.stats.numpy(), table.victims.numpy()
    slot_of, expert_of, tiles_in = table.slot_of.numpy(), table.expert_of.numpy(), table.tiles_in.numpy()
    busy = {base - place.num_experts + e for e in now.view(-1).tolist() if e >= 0}
    for expert, _, first, end in table.ahead.tolist():
        if base - place.num_experts <= expert < base:
            stats[JUDGED] += end - first
            stats[RIGHT] += (end - first) * (expert in busy)
    asked = np.unique(base + soon.numpy()[soon.numpy() >= 0]).astype(np.int64)
    left, keys, brought = min(int(table.budget[0]), len(table.ahead)), _keys(table), []
    kept = busy | set(asked.tolist())
    givable = [v for v, s in enumerate(victims.tolist()) if s > 0 and int(expert_of[s]) not in kept]
    for expert in sorted(asked.tolist(), key=lambda e: (-keys[e], e)):
        slot = max(int(slot_of[expert]), 0)
        have = int(tiles_in[slot]) if slot else 0
        fill = min(place.num_tiles - have, left)
        if fill <= 0:
            continue
        left -= fill
        if not slot:
            if not givable:
                continue
            at = givable.pop(0)
            slot, victims[at] = int(victims[at]), 0
            if expert_of[slot] >= 0:
                slot_of[expert_of[slot]] = -1
            expert_of[slot], slot_of[expert] = expert, slot
        tiles_in[slot] = have + fill
        brought.append((expert, slot, have, have + fill))
        stats[AHEAD] += fill
    table.ahead[len(brought) :, 0] = -1
    if brought:
        table.ahead[: len(brought)] = torch.tensor(sorted(brought), dtype=torch.int32)


def seed(table: Table, place: Place, ids: Tensor) -> None:
    counts = np.bincount(ids[ids >= 0].numpy(), minlength=place.num_experts).astype(np.int32)
    table.counts.copy_(torch.from_numpy(counts))
    if table.policy == "two_speed":
        base = place.layer * place.num_experts
        slow = table.slow.numpy()[base : base + place.num_experts]
        moved = slow - (slow >> 1) + (np.minimum(counts, rules.SEED_TOKENS) << rules.SEED_SHIFT)
        slow[counts > 0] = moved[counts > 0]


def promote(table: Table, place: Place, addresses: Tensor, span: tuple[int, int], quota: int) -> None:
    base, nt, victims = place.layer * place.num_experts, place.num_tiles, table.victims.numpy()
    slot_of, expert_of, tiles_in = table.slot_of.numpy(), table.expert_of.numpy(), table.tiles_in.numpy()
    counts, keys, step = table.counts.numpy(), _keys(table), int(table.words[STEP])
    ranked = np.lexsort((np.arange(len(counts)), -counts))[:quota]
    wanted = {int(e) for e in ranked if counts[e] > 0}
    if table.policy != "two_speed":
        keys = keys.copy()
        keys[base : base + place.num_experts] = step
    chosen = []
    for local in range(*span):
        slot = max(int(slot_of[base + local]), 0)
        have = int(tiles_in[slot]) if slot else 0
        if int(addresses[local]) and have < nt and (slot or local in wanted):
            chosen.append(base + local)
    chosen = sorted(chosen, key=lambda e: (-keys[e], e))[: len(victims)]
    kept = {base + e for e in wanted}
    givable = [
        v
        for v, s in enumerate(victims.tolist())
        if s > 0 and expert_of[s] < base + span[1] and int(expert_of[s]) not in kept
    ]
    brought = []
    for expert in chosen:
        slot = max(int(slot_of[expert]), 0)
        have = int(tiles_in[slot]) if slot else 0
        if not slot:
            if table.policy != "two_speed":
                table.fast[expert] = step
            if not givable:
                continue
            at = givable.pop(0)
            owner = int(expert_of[victims[at]])
            if owner >= 0 and keys[owner] >= keys[expert]:
                continue
            slot, victims[at] = int(victims[at]), 0
            if owner >= 0:
                slot_of[owner] = -1
            expert_of[slot], slot_of[expert] = expert, slot
            table.stats[PROMOTED] += 1
        tiles_in[slot] = nt
        brought.append((expert, slot, have, nt))
    table.ahead[len(brought) :, 0] = -1
    if brought:
        table.ahead[: len(brought)] = torch.tensor(sorted(brought), dtype=torch.int32)


def fetch_ahead(table: Table, place: Place, addresses: Tensor | None) -> None:
    for expert, slot, first, end in table.ahead.tolist():
        if expert < 0:
            break
        a = place.tiles_offset + first * place.tile_bytes if first else 0
        b = place.tiles_offset + end * place.tile_bytes
        local = expert - place.layer * place.num_experts
        source = _seen(place, local) if addresses is None else _bytes_at(int(addresses[local]), b)
        place.slots[slot, a:b] = source[a:b]


def _seen(place: Place, expert: int) -> Tensor:
    """uint8 [record_bytes]: what lies at the address that the device was given."""
    assert place.address, "the device can't see these records"
    size = place.records.shape[1]
    return _bytes_at(place.address + expert * size, size)


def _bytes_at(address: int, size: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


def run_tiles(table: Table, place: Place, call: Call) -> None:
    coded = place.coded
    for expert, slot, have, end in table.work.tolist():
        if expert < 0:
            break
        rows, ranks = (call.ids == expert).nonzero(as_tuple=True)
        for tile in range(end):
            a = coded.tiles_offset + tile * coded.tile_bytes
            source = _seen(place, expert) if tile >= have else place.slots[slot]
            bytes_ = source[a : a + coded.tile_bytes]
            if tile >= have and slot:
                place.slots[slot, a : a + coded.tile_bytes] = bytes_
            parts = partial(place, call.x[rows], bytes_)
            if tile == 0 and coded.bias_offset:
                parts += source[: 4 * coded.hidden].view(torch.float32)
            call.partials[rows * call.ids.shape[1] + ranks, tile] = parts
        if end > have and slot and have == 0:
            place.slots[slot, : place.tiles_offset] = _seen(place, expert)[: place.tiles_offset]


def partial(place: Place, x: Tensor, tile: Tensor) -> Tensor:
    """float32 [n, H] of rows [n, H] and a tile's bytes, without down's bias."""
    coded = place.coded
    gate, up, down = _weights(coded, tile)
    rows = x.float()
    g, u = rows @ gate.t(), rows @ up.t()
    if coded.bias_offset:
        size = 4 * coded.tile_width
        biases = tile[coded.bias_offset : coded.bias_offset + 2 * size].view(torch.float32)
        g, u = g + biases[: coded.tile_width], u + biases[coded.tile_width :]
    return gated(place.activation, g, u).to(x.dtype).float() @ down


def _weights(coded: Coded, tile: Tensor) -> tuple[Tensor, ...]:
    w, h = coded.tile_width, coded.hidden
    return tuple(matrix_of(tile, matrix, w, h) for matrix in coded.matrices)


def _wait(table: Table, call: Call) -> None:
    """Until the host has answered, a second at most."""
    until = time.monotonic() + 1.0
    while int(call.io.reply[0]) < int(table.words[PENDING]) and time.monotonic() < until:
        time.sleep(1e-5)
    if int(call.io.reply[0]) < int(table.words[PENDING]):
        table.words[FAILED] = call.io.poison[0] = 1


def combine(table: Table, place: Place, call: Call, residual: Tensor | None = None) -> Tensor:
    rows, top_k = call.ids.shape
    out = torch.zeros(rows, place.hidden)
    if call.io is not None:
        _wait(table, call)
    here = table.here.tolist()
    for r, experts in enumerate(call.ids.tolist()):
        for j, expert in enumerate(experts):
            if expert < 0:
                continue
            end, route = here[expert], r * top_k + j
            total = call.partials[route, :end].sum(0)
            if end < place.num_tiles:
                total = total + call.io.out[route]
            out[r] += call.weights[r, j] * total
    return out if residual is None else residual + out.to(residual.dtype)
