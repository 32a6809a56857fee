"""Replays a trace against a policy and counts hits and misses of the decode steps. Pure integers.

Owns the model of residency that replays share: slots without bytes or time, a share of the misses filled,
the experts of the running layer never evicted. Doesn't know how long anything takes (`simulate` does).
Invariant: hits + misses = distinct routed experts of the counted layer-steps, fills <= misses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.bench.traces import DECODE, NO_ROUTING, PREFILL, Trace
from freetoken.core.interfaces import Policy

SEED_TOKENS = 128
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """Decode totals of one replay: distinct routed experts, and what became of them."""

    requests: int = 0
    misses: int = 0
    fills: int = 0
    evictions: int = 0

    @property
    def miss_rate(self) -> float:
        return self.misses / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Reads:
    """A trace as a policy sees it.

    decode    per decode step, per layer with routing: distinct global ids, ascending
    prefills  (index of the decode step that follows, ids, rows that chose each among the last tokens)
    """

    decode: list[list[Ids]]
    prefills: list[tuple[int, Ids, Ids]]

    def layer_steps(self) -> Iterator[tuple[int, Ids]]:
        for step, layers in enumerate(self.decode):
            for ids in layers:
                yield step, ids


def _global_ids(trace: Trace) -> Ids:
    """int64 [N, L, k]: layer * num_experts + expert, -1 where there is no routing."""
    none = NO_ROUTING[trace.topk.dtype.itemsize]
    base = np.arange(trace.num_layers, dtype=np.int64)[None, :, None] * trace.num_experts
    return np.where(trace.topk == none, np.int64(-1), trace.topk.astype(np.int64) + base)


def read_trace(trace: Trace) -> Reads:
    """Deduplicate each batch's layer-steps and sum up each request's prefill."""
    ids = _global_ids(trace)
    decode: list[list[Ids]] = []
    prefills: list[tuple[int, Ids, Ids]] = []
    for phase, rows in trace.engine_steps():
        if phase == DECODE:
            layers = (np.unique(layer) for layer in ids[rows].transpose(1, 0, 2))
            layers = (layer[layer >= 0] for layer in layers)
            decode.append([layer for layer in layers if layer.size])
        elif phase == PREFILL:
            found, counts = np.unique(ids[rows][-SEED_TOKENS:], return_counts=True)
            prefills.append((len(decode), found[found >= 0], counts[found >= 0].astype(np.int64)))
    return Reads(decode, [p for p in prefills if p[1].size])


class Residency:
    """Slots as two arrays; the mechanism's rules without its bytes."""

    def __init__(self, policy: Policy, num_experts_total: int, num_slots: int, token_cycle: int) -> None:
        policy.reset(num_experts_total, num_slots, token_cycle)
        self.policy, self.num_slots = policy, num_slots
        self.slot_of: Ids = np.full(num_experts_total, -1, dtype=np.int64)
        self.expert_of: Ids = np.full(num_slots, -1, dtype=np.int64)
        self.used = 0
        self._credit = 0.0

    def missing(self, ids: Ids) -> Ids:
        return ids[self.slot_of[ids] < 0]

    def fill(self, ids: Ids, missing: Ids, step: int, share: float) -> tuple[int, int]:
        """Fill a share of `missing`, never evicting `ids`. Returns fills and evictions."""
        self._credit = min(self._credit, 1.0) + share * missing.size
        order = self.policy.order_fills(missing.tolist(), step)[: int(self._credit)]
        free = min(len(order), self.num_slots - self.used)
        for expert in order[:free]:
            self._put(expert, self.used)
            self.used += 1
        fills = free + self._replace(order[free:], ids, step)
        self._credit -= fills
        return fills, fills - free

    def place(self, experts: list[int]) -> None:
        """Make exactly these resident, then as many of the old ones as fit."""
        kept = self.expert_of[: self.used].tolist()
        chosen = list(dict.fromkeys([*experts, *kept]))[: self.num_slots]
        self.slot_of[:] = -1
        self.used = len(chosen)
        for slot, expert in enumerate(chosen):
            self._put(expert, slot)

    def fill_up(self) -> None:
        """Put absent experts into the free slots, spread over the layers."""
        absent = np.flatnonzero(self.slot_of < 0)
        free = self.num_slots - self.used
        for expert in absent[np.arange(free) * absent.size // max(free, 1)].tolist():
            self._put(expert, self.used)
            self.used += 1

    def _replace(self, wanted: list[int], ids: Ids, step: int) -> int:
        if not wanted:
            return 0
        resident = self.expert_of[: self.used]
        busy = set(ids.tolist())
        victims = self.policy.order_victims(resident, len(wanted) + len(busy), step)  # type: ignore[arg-type]
        victims = [v for v in victims if v not in busy][: len(wanted)]
        for expert, victim in zip(wanted, victims, strict=False):
            slot = int(self.slot_of[victim])
            self.slot_of[victim] = -1
            self._put(expert, slot)
        return len(victims)

    def _put(self, expert: int, slot: int) -> None:
        self.slot_of[expert] = slot
        self.expert_of[slot] = expert


def replay(
    trace: Trace,
    reads: Reads,
    policy: Policy,
    num_slots: int,
    *,
    share: float = 1.0,
    warm_up: int = 0,
) -> Counts:
    """Run the decode steps of a trace through `num_slots` slots.

    share    of the misses that are filled; the rest is computed on the CPU and leaves no trace
    warm_up  decode steps that are run but not counted
    """
    state = Residency(policy, trace.pool, num_slots, trace.token_cycle)
    prefills = list(reversed(reads.prefills))
    requests = misses = fills = evictions = 0
    for step, layers in enumerate(reads.decode):
        while prefills and prefills[-1][0] == step:
            _, ids, counts = prefills.pop()
            policy.seed(ids.tolist(), counts.tolist(), step)
            state.place(policy.place(num_slots))
        for ids in layers:
            missing = state.missing(ids)
            policy.touch(ids, step)  # type: ignore[arg-type]
            filled = evicted = 0
            if missing.size:
                filled, evicted = state.fill(ids, missing, step, share)
            if step >= warm_up:
                requests += ids.size
                misses += missing.size
                fills += filled
                evictions += evicted
    return Counts(requests, misses, fills, evictions)


def without_prefills(reads: Reads) -> Reads:
    """The same decode steps for a policy that is not told of prompts."""
    return Reads(reads.decode, [])


def with_hindsight(reads: Reads) -> Reads:
    """The same steps, and before them a prefill with all decode steps' own frequencies."""
    every = [ids for _, ids in reads.layer_steps()]
    ids, counts = np.unique(np.concatenate(every), return_counts=True)
    return Reads(reads.decode, [(0, ids, counts.astype(np.int64)), *reads.prefills])
