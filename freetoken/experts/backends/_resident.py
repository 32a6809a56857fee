"""Slots on the device: the layer-step that offload and hybrid share.

A layer-step looks its experts up, divides what is missing between link and host (subclasses say how),
launches both, computes what is resident meanwhile, then what was filled, then adds the host's answers.
Experts that find no slot wait for a later wave, when the slots of those already computed are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from freetoken.core.interfaces import Event, Policy, Routing
from freetoken.experts.backends._base import BaseBackend
from freetoken.experts.fills import Fill, FillQueue
from freetoken.experts.host_branch import HostBranch, HostJob
from freetoken.experts.ring import Ring
from freetoken.experts.rows import Ints
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.slots import ExpertSlots
from freetoken.experts.stream import Streamer, needed_share
from freetoken.experts.work import LayerWork


@dataclass
class Step:
    """A layer-step in flight. Members index plan.experts.

    have     int64 [n]   tiles usable on the device when the step began
    until    int64 [n]   tiles that the device computes in this wave; the host does the rest
    later    members that wait for a slot
    late_s   what computing the filled tiles took once they were there
    """

    experts: Ints
    slots: Ints
    have: Ints
    until: Ints
    started_s: float
    event: Event | None = None
    filled_tiles: int = 0
    late_s: float = 0.0
    jobs: list[HostJob] = field(default_factory=list)
    later: list[int] = field(default_factory=list)


class ResidentBackend(BaseBackend):
    """Residency by slots; `_divide` of a subclass decides who brings or computes the missing tiles."""

    def __init__(self, setup: ExpertSetup, policy: Policy) -> None:
        super().__init__(setup)
        assert setup.config.moe is not None
        cycle = self.bank.num_layers * setup.config.moe.top_k
        self.policy = policy
        self.slots = ExpertSlots(self.bank, self.device, policy, setup.num_slots, setup.max_slots)
        policy.reset(setup.num_records, self.slots.num_slots, cycle)
        self._queue = FillQueue(self.slots, self.device, self.bank.num_experts)
        self._ring = Ring(self.slots, self.device, setup.overlap, setup.ring_group)
        top_k = setup.config.moe.top_k
        self._streamer = Streamer(
            self._ring, self.slots, self.math, self._run_whole, top_k, lambda: self._now
        )
        self._host: HostBranch | None = None
        self._now = 0
        self._step: Step | None = None
        self._ended_s = self.device.clock.now()
        self._gap_s = 0.0

    def end_step(self, step_s: float) -> None:
        super().end_step(step_s)
        self._now += 1

    def preload(self, experts: list[int]) -> None:
        """Make experts resident before serving, best first, as far as there are free slots."""
        free = self.slots.take(min(len(experts), self.slots.num_slots - self.slots.num_resident), self._now)
        fills = []
        for slot, expert in zip(free, experts, strict=False):
            self.slots.bind(slot, expert, self._now)
            fills.append(Fill(expert, 0, int(self.slots.num_tiles[expert])))
        for at in range(0, len(fills), self.bank.num_experts):
            event = self._queue.submit(fills[at : at + self.bank.num_experts])
            self.device.compute.wait(event)
            self.slots.arrived()
        self.stats.link_bytes = self._queue.link_bytes

    def absent_bytes(self, num_tokens: int) -> int:
        bank, k = self.bank, self._streamer.top_k
        share = needed_share(num_tokens, bank.num_experts, k)
        resident = int((self.slots.slot_of >= 0).sum())
        absent = bank.num_layers * bank.num_experts - resident
        return int(absent * share * bank.total_bytes / (bank.num_layers * bank.num_experts))

    def begin_job(self, num_tokens: int) -> None:
        self.slots.poll()
        if not self._ring.is_open:
            self._ring.open(self._now)
        if not self._ring.is_open:
            self.device.synchronize()
            self.slots.poll()
            self._ring.open(self._now)

    def end_job(self) -> None:
        self._ring.close()

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        if self.on_routing is not None:
            self.on_routing(layer, routing.ids)
        if not self._ring.is_open:
            self.begin_job(x.shape[0])
        works, cut = [], self.setup.chunk_tokens
        for at in range(0, x.shape[0], cut):
            some = Routing(routing.ids[at : at + cut], routing.weights[at : at + cut])
            works.append(self._plan(layer, x[at : at + cut], some, with_sums=False))
        scratch = self.math.output(max(work.plan.num_rows for work in works), works[0].layout.hidden)
        for work in works:
            work.z = scratch[: work.plan.num_rows + 1]
        outs = yield from self._streamer.layer(layer, works, routing.ids)
        self.stats.prefill_link_bytes = self._ring.link_bytes
        self.stats.promotions = self._streamer.promotions
        self.stats.evictions = self.slots.evictions
        return torch.cat(outs)

    def resize(self, num_slots: int) -> None:
        """A prefill under way loses its ring's contents and loads them again."""
        streaming = self._ring.is_open
        self._ring.close()
        try:
            self.slots.resize(num_slots, self._now)
        finally:
            if streaming:
                self.begin_job(0)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def _divide(self, work: LayerWork, step: Step, missing: Ints) -> None:
        """Bind slots, set `until`, `jobs` and `later`; then `_submit`."""
        raise NotImplementedError

    def _observe(self, work: LayerWork, step: Step) -> None:
        """Learn from a finished layer-step."""

    def _start(self, work: LayerWork) -> None:
        slots, plan = self.slots, work.plan
        started = self.device.clock.now()
        self._gap_s += 0.125 * (started - self._ended_s - self._gap_s)
        slots.poll()
        experts = plan.experts + work.layer * self.bank.num_experts
        self.policy.touch(experts, self._now)  # type: ignore[arg-type]  # ints by any name
        where, have = slots.lookup(experts, self._now)
        step = self._step = Step(experts, where, have, have.copy(), started)
        missing = np.flatnonzero(have < work.layout.num_tiles)
        self._count(work, step, missing)
        if len(missing):
            self._divide(work, step, missing)
            if self._host is not None:
                self._host.start(work, step.jobs)
        self._compute(work, where, np.zeros_like(have), have)

    def _complete(self, work: LayerWork) -> None:
        step, slots = self._step, self.slots
        assert step is not None
        while True:
            if step.event is not None:
                self.device.compute.wait(step.event)
                slots.arrived()
                began = self.device.clock.now()
                self._compute(work, step.slots, step.have, step.until)
                step.late_s = self.device.clock.now() - began
            if not step.later:
                break
            slots.unpin()
            self._next_wave(work, step)
        if self._host is not None:
            self._host.complete(work)
        slots.unpin()
        self._observe(work, step)
        self._ended_s, self._step = self.device.clock.now(), None
        if slots.rest:
            budget = int(self._gap_s * self.device.machine.link_bw)
            self._queue.follow(max(1, budget))
        self.stats.link_bytes = self._queue.link_bytes
        self.stats.evictions = slots.evictions

    def _next_wave(self, work: LayerWork, step: Step) -> None:
        """Fill what found no slot before; everything computed so far may be evicted."""
        step.have = step.until.copy()
        waiting, step.later = step.later, []
        self._fill_whole(work, step, waiting)

    def _fill_whole(self, work: LayerWork, step: Step, members: list[int]) -> None:
        """Bring all that is missing of `members`, as far as there are slots; the rest goes to `later`."""
        slots, fills = self.slots, []
        absent = [m for m in members if slots.slot_of[step.experts[m]] < 0]
        free = iter(slots.take(len(absent), self._now))
        for member in members:
            expert = int(step.experts[member])
            if slots.slot_of[expert] < 0:
                slot = next(free, 0)
                if not slot:
                    step.later.append(member)
                    continue
                slots.bind(slot, expert, self._now)
            step.slots[member] = slots.slot_of[expert]
            step.until[member] = work.layout.num_tiles
            fills.append(Fill(expert, int(slots.tiles_sent[step.slots[member]]), work.layout.num_tiles))
        self._submit(work, step, fills)

    def _submit(self, work: LayerWork, step: Step, fills: list[Fill]) -> None:
        """Enqueue what isn't on its way already; the event covers older copies of these experts too."""
        new = [f for f in fills if f.last > f.first]
        step.event = self._queue.submit(new)
        self.stats.fills += sum(f.first == 0 for f in new)

    def _count(self, work: LayerWork, step: Step, missing: Ints) -> None:
        tiles = work.layout.num_tiles * len(missing) - int(step.have[missing].sum())
        self.stats.misses += len(missing)
        self.stats.hits += len(step.experts) - len(missing)
        self.stats.missing_tiles += tiles

    def _compute(self, work: LayerWork, slots: Ints, first: Ints, last: Ints) -> None:
        """Compute tiles [first, last) of each expert from its slot, equal runs together."""
        runs: dict[tuple[int, int], list[int]] = defaultdict(list)
        for member, run in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            if run[0] < run[1]:
                runs[run].append(member)
        for (a, b), some in runs.items():
            members = np.array(some, np.int64)
            self._run(work, members, self.slots.view(), slots[members], a, b)
            self.slots.read(slots[members], work.layout.tile_range(0, b)[1])

    def _run_whole(self, work: LayerWork, members: Ints, slots: Ints) -> None:
        if len(members):
            self._run(work, members, self.slots.view(), slots, 0, work.layout.num_tiles)
            self.slots.read(slots, work.layout.used_bytes)
