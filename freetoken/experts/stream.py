"""Layer-major prefill: one MoE layer over all rows of a macro-chunk, experts in ascending order.

Resident experts are used in place, absent ones come through the ring in groups, and every expert meets
all sub-chunks while it is there: the pool crosses the link at most once per macro-chunk. The next layer's
absent experts start before its routing is known when nearly all will be needed.
A decode step may be interposed at every yield. It may evict or bring experts, or the slots may be resized:
where an expert lies is looked up anew after each, and one that lost its place is fetched by itself.
Sums grow in ascending expert id, as everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from freetoken.experts.math import ExpertMath
from freetoken.experts.ring import Load, Ring
from freetoken.experts.rows import Ints
from freetoken.experts.slots import ExpertSlots
from freetoken.experts.work import LayerWork

NEARLY_ALL = 0.9
LAST_ROWS = 32

Run = Callable[[LayerWork, Ints, Ints], None]


def needed_share(num_tokens: int, num_experts: int, top_k: int) -> float:
    """Expected share of a layer's experts that `num_tokens` tokens use, routed evenly."""
    return 1.0 - (1.0 - top_k / num_experts) ** num_tokens


@dataclass
class Streamer:
    """Streams layers of one prefill job; `run(work, members, slots)` computes whole experts on the device."""

    ring: Ring
    slots: ExpertSlots
    math: ExpertMath
    run: Run
    top_k: int
    step: Callable[[], int]
    promotions: int = 0

    def layer(
        self, layer: int, works: Sequence[LayerWork], ids: Tensor
    ) -> Generator[None, None, list[Tensor]]:
        """Compute `works` (a layer's sub-chunks); `ids` int32 [T, k] is the routing of all their rows."""
        outs = [self.math.start_sum(work.plan, work.layout.hidden) for work in works]
        wanted = self._seed(layer, ids)
        loads, todo = self._begin(layer, works)
        at, end = layer * self.slots.bank.num_experts, (layer + 1) * self.slots.bank.num_experts
        num_tokens = sum(work.plan.num_tokens for work in works)
        self._pump(loads, todo, layer, num_tokens)
        while at < end:
            load = loads.popleft() if loads else None
            stop = load.experts[0] if load else end
            yield from self._span(works, outs, at, stop, None)
            at = stop
            if load is not None:
                at = load.experts[-1] + 1
                yield from self._span(works, outs, load.experts[0], at, load)
                self.promotions += self.ring.done(load, wanted, self.step())
                if load.epoch != self.ring.epoch:
                    loads, todo = self._begin(layer, works, at)
                self._pump(loads, todo, layer, num_tokens)
        return outs

    def _begin(self, layer: int, works: Sequence[LayerWork], at: int = 0) -> tuple[deque[Load], deque[int]]:
        """Loads of this layer that are under way, and the absent experts >= `at` still to load."""
        ring, base = self.ring, layer * self.slots.bank.num_experts
        loads: deque[Load] = deque()
        if ring.ahead_layer == layer:
            loads = ring.ahead
        ring.ahead, ring.ahead_layer = deque(), -1
        ring.ahead_todo.clear()
        needed = np.unique(np.concatenate([work.plan.experts for work in works])) + base
        after = max(at, loads[-1].experts[-1] + 1 if loads else 0)
        return loads, deque(e for e in needed.tolist() if e >= after and not self._is_whole(e))

    def _pump(self, loads: deque[Load], todo: deque[int], layer: int, num_tokens: int) -> None:
        """Load into every free buffer: this layer's experts first, then the next layer's."""
        ring, bank = self.ring, self.slots.bank
        while ring.free and todo:
            loads.append(ring.load(_next(todo, len(ring.free[0]))))
        if todo or not ring.overlap or layer + 1 >= bank.num_layers or not ring.free:
            return
        if needed_share(num_tokens, bank.num_experts, self.top_k) < NEARLY_ALL:
            return
        if ring.ahead_layer != layer + 1:
            first = (layer + 1) * bank.num_experts
            ring.ahead_layer = layer + 1
            ring.ahead_todo = deque(
                e for e in range(first, first + bank.num_experts) if not self._is_whole(e)
            )
        while ring.free and ring.ahead_todo:
            ring.ahead.append(ring.load(_next(ring.ahead_todo, len(ring.free[0]))))

    def _span(
        self, works: Sequence[LayerWork], outs: list[Tensor], start: int, stop: int, load: Load | None
    ) -> Generator[None, None, None]:
        """Add experts [start, stop) to every sub-chunk's sum, yielding after each that had any."""
        for work, out in zip(works, outs, strict=True):
            base = work.layer * self.slots.bank.num_experts
            local = work.plan.experts
            first, last = np.searchsorted(local, [start - base, stop - base])
            if first == last:
                continue
            members = np.arange(first, last)
            where = self._locate(local[members] + base, load)
            known = where > 0
            self.run(work, members[known], where[known])
            for member in members[~known].tolist():
                slot = self.ring.fetch(int(local[member]) + base)
                self.run(work, np.array([member]), np.array([slot]))
            self.math.accumulate(out, work.z, work.plan, members, work.weights)
            yield

    def _locate(self, experts: Ints, load: Load | None) -> Ints:
        """Slots of experts, 0 where one is nowhere (any more)."""
        where = np.array([self.slots.slot_of[e] if self._is_whole(e) else 0 for e in experts.tolist()])
        if load is not None and load.epoch == self.ring.epoch:
            if not load.waited:
                self.ring.device.compute.wait(load.event)
                load.waited = True
            held = dict(zip(load.experts, load.slots, strict=False))
            where = np.array([held.get(e, w) for e, w in zip(experts.tolist(), where.tolist(), strict=True)])
        return where.astype(np.int64)

    def _is_whole(self, expert: int) -> bool:
        slot = self.slots.slot_of[expert]
        return bool(slot > 0 and self.slots.tiles_in[slot] == self.slots.num_tiles[expert])

    def _seed(self, layer: int, ids: Tensor) -> frozenset[int]:
        """Tell the policy what the last tokens used; return the experts worth promoting."""
        last = ids[-LAST_ROWS:].numpy()
        experts, counts = np.unique(last[last >= 0], return_counts=True)
        experts = experts.astype(np.int64) + layer * self.slots.bank.num_experts
        self.slots.policy.seed(experts.tolist(), counts.tolist(), self.step())
        quota = max(1, self.slots.num_slots // self.slots.bank.num_layers)
        order = np.lexsort((experts, -counts))[:quota]
        return frozenset(experts[order].tolist())


def _next(todo: deque[int], count: int) -> list[int]:
    return [todo.popleft() for _ in range(min(count, len(todo)))]
