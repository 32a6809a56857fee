"""Belady's choice: the fewest misses that any residency could have had, knowing the future.

Owns the offline optimum with optional fills (a miss may be computed elsewhere and leave the slots alone).
The expert whose next use is farthest gives way, be it a resident or the miss itself. It is a lower bound
for every policy that starts from the same contents; with `place_at` it may also choose its contents
freely before the given steps, as policies seeded by a prefill do.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from freetoken.bench.replay import Counts, Reads


def belady(reads: Reads, num_slots: int, *, place_at: Collection[int] = (), warm_up: int = 0) -> Counts:
    """Count the optimum's misses of a trace's decode steps in `num_slots` slots."""
    accesses = [(step, expert) for step, ids in reads.layer_steps() for expert in ids.tolist()]
    following = _next_uses([expert for _, expert in accesses])
    cache = _Cache(num_slots)
    requests = misses = 0
    pending = sorted(place_at, reverse=True)
    for at, (step, expert) in enumerate(accesses):
        if pending and pending[-1] <= step:
            while pending and pending[-1] <= step:
                pending.pop()
            cache.place(_first_uses(accesses, at))
        hit = cache.access(expert, following[at])
        if step >= warm_up:
            requests += 1
            misses += not hit
    return Counts(requests, misses, cache.fills, cache.evictions)


def _next_uses(experts: Sequence[int]) -> list[int]:
    """For each access the index of the same expert's next one."""
    never = len(experts)
    following = [never] * never
    later: dict[int, int] = {}
    for at in range(never - 1, -1, -1):
        following[at] = later.get(experts[at], never)
        later[experts[at]] = at
    return following


def _first_uses(accesses: Sequence[tuple[int, int]], start: int) -> dict[int, int]:
    """Index of every expert's first access from `start` on."""
    uses: dict[int, int] = {}
    for at in range(start, len(accesses)):
        uses.setdefault(accesses[at][1], at)
    return uses


class _Cache:
    """Residents by next use; stale heap entries are skipped when met."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.next_use: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []
        self.fills = self.evictions = 0

    def place(self, uses: dict[int, int]) -> None:
        soonest = sorted(uses.items(), key=lambda item: item[1])[: self.num_slots]
        self.next_use = dict(soonest)
        self.heap = [(-use, expert) for expert, use in soonest]
        heapq.heapify(self.heap)

    def access(self, expert: int, use: int) -> bool:
        hit = expert in self.next_use
        if not hit:
            if len(self.next_use) >= self.num_slots and not self._evict_later_than(use):
                return False
            self.fills += 1
        self.next_use[expert] = use
        heapq.heappush(self.heap, (-use, expert))
        return hit

    def _evict_later_than(self, use: int) -> bool:
        while self.next_use.get(self.heap[0][1]) != -self.heap[0][0]:
            heapq.heappop(self.heap)
        if -self.heap[0][0] <= use:
            return False
        del self.next_use[heapq.heappop(self.heap)[1]]
        self.evictions += 1
        return True
