"""Missing tiles are divided between link and host executor, so that both finish together.

Fill order is the policy's; the first experts are filled whole, at most one is cut (the link brings its
first tiles, the CPU computes the others, the rest follows in the background), the CPU takes what remains.
Experts with many rows are always filled: the CPU is only faster while reading weights is what costs.
"""

from __future__ import annotations

import numpy as np

from freetoken.core.interfaces import ExpertBackend, Policy
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.backends._resident import ResidentBackend, Step
from freetoken.experts.controller import Controller
from freetoken.experts.fills import Fill
from freetoken.experts.host_branch import HostBranch, HostJob
from freetoken.experts.rows import Ints
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.split import bucket_of
from freetoken.experts.work import LayerWork


class HybridBackend(ResidentBackend):
    name = "hybrid"

    def __init__(self, setup: ExpertSetup, policy: Policy) -> None:
        super().__init__(setup, policy)
        self._host = HostBranch(setup)
        self.controller = Controller(self.device.machine, max(one.tile_bytes for one in self.bank.layouts))
        self._frozen = False

    def freeze(self, frozen: bool) -> None:
        self._frozen = frozen

    def end_step(self, step_s: float) -> None:
        super().end_step(step_s)
        if not self._frozen:
            self.controller.end_step(step_s)
        self.stats.extra["hybrid_left"] = float(self.controller.guard.left)

    def _divide(self, work: LayerWork, step: Step, missing: Ints) -> None:
        if self.setup.static or work.layer < self.setup.cpu_layers:
            self._host_does(work, step, missing.tolist())
            return
        tiles = work.layout.num_tiles
        sent = np.maximum(self.slots.tiles_sent[step.slots[missing]], step.have[missing])
        total = int((tiles - step.have[missing]).sum())
        wanted = self.controller.tiles_to_fill(total, bucket_of(work.plan.num_tokens))
        wanted -= int((sent - step.have[missing]).sum())
        ordered = self._order(work, step, missing)
        budget = {int(m): int(tiles - s) for m, s in zip(missing, sent, strict=True)}
        heavy = [m for m in ordered if self._is_heavy(work, m)]
        wanted = max(wanted, sum(budget[m] for m in heavy))
        self._bring(work, step, ordered, budget, wanted)

    def _order(self, work: LayerWork, step: Step, missing: Ints) -> list[int]:
        """Members in fill order: heavy ones, then as the policy ranks them, then what it left out."""
        member_of = {int(step.experts[m]): int(m) for m in missing}
        ranked = [member_of[e] for e in self.policy.order_fills(list(member_of), self._now)]
        ranked += [m for m in member_of.values() if m not in set(ranked)]
        return sorted(ranked, key=lambda m: not self._is_heavy(work, m))

    def _is_heavy(self, work: LayerWork, member: int) -> bool:
        """More rows than the CPU computes in the time that it reads the weights."""
        machine, one = self.device.machine, work.layout
        rows = int(work.plan.counts[member])
        flops = 6.0 * one.hidden * one.tile_width * rows
        return rows > 2 and flops * machine.host_bw > one.tile_bytes * machine.cpu_flops

    def _bring(
        self, work: LayerWork, step: Step, ordered: list[int], budget: dict[int, int], wanted: int
    ) -> None:
        """Fill `wanted` tiles in order, cut at most one expert, leave the rest to the host."""
        slots, fills, jobs = self.slots, [], []
        cap = self.setup.max_fetch or len(ordered)
        need, left = 0, wanted
        for member in ordered[:cap]:
            if left <= 0:
                break
            need += slots.slot_of[step.experts[member]] < 0
            left -= budget[member]
        free = iter(slots.take(int(need), self._now))
        left = wanted
        for rank, member in enumerate(ordered):
            expert = int(step.experts[member])
            held = int(slots.slot_of[expert])
            sent = work.layout.num_tiles - budget[member]
            brings = min(budget[member], max(0, left)) if rank < cap else 0
            if brings and held < 0:
                held = next(free, 0)
                brings = brings if held else 0
                if held:
                    slots.bind(held, expert, self._now)
            last = sent + brings
            if held > 0:
                step.slots[member], step.until[member] = held, last
            left -= brings
            if last > step.have[member]:
                fills.append(Fill(expert, sent, last))
                step.filled_tiles += last - int(step.have[member])
            if last < work.layout.num_tiles:
                jobs.append(HostJob(member, last))
                if brings:
                    slots.rest.append((expert, int(slots.generation[held])))
        self._share(work, step, fills, jobs)

    def _host_does(self, work: LayerWork, step: Step, members: list[int]) -> None:
        self._share(work, step, [], [HostJob(m, int(step.have[m])) for m in members])

    def _share(self, work: LayerWork, step: Step, fills: list[Fill], jobs: list[HostJob]) -> None:
        step.jobs = jobs
        cpu_tiles = sum(work.layout.num_tiles - job.first for job in jobs)
        self.stats.filled_tiles += step.filled_tiles
        self.stats.cpu_tiles += cpu_tiles
        self.stats.host_bytes += cpu_tiles * work.layout.tile_bytes
        if fills:
            self._submit(work, step, fills)

    def _observe(self, work: LayerWork, step: Step) -> None:
        assert self._host is not None
        if step.event is None and self._host.event is None:
            return
        arrived = step.event.time_s() - step.started_s + step.late_s if step.event else 0.0
        fill = (step.filled_tiles, arrived)
        done = self._host.event if step.jobs else None
        cpu = (self._host.tiles, done.time_s() - step.started_s) if done else (0, 0.0)
        self.controller.observe(bucket_of(work.plan.num_tokens), fill, cpu)


def create(setup: ExpertSetup) -> ExpertBackend:
    if setup.device.kernels:
        return DeviceBackend(setup, "hybrid")
    assert setup.policy is not None
    return HybridBackend(setup, setup.policy)
