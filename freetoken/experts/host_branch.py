"""The host branch of a layer: the device's side of the ABI page, and the stream `host` it runs on.

Owns the IO block and its one request in flight. Writes the work list on `compute`, lets `host` wait for
it, and adds the answers to the sums after `compute` has waited for `host`. Doesn't decide who computes
what. Work that doesn't fit the block goes out in rounds, the first at once, the rest in `complete`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from freetoken.core.interfaces import Event, Stream
from freetoken.experts.abi import IoBlock
from freetoken.experts.cpu_executor import CpuExecutor
from freetoken.experts.native_executor import NativeExecutor, native_layers
from freetoken.experts.rows import padded_rows
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork


@dataclass(frozen=True)
class HostJob:
    """Tiles [first, T) of the plan's expert `member`, to be computed in host memory."""

    member: int
    first: int


class HostBranch:
    """`start` launches, `complete` waits and adds. Times are of the device's clock."""

    def __init__(self, setup: ExpertSetup) -> None:
        self._device, self._bank = setup.device, setup.bank
        self._compute: Stream = setup.device.compute
        self._host = setup.device.stream("host")
        self._math = setup.arithmetic()
        self._io: IoBlock | None = None
        self._executor: CpuExecutor | NativeExecutor | None = None
        if not setup.bank.phantom:
            self._make_block(setup)
        self._rounds: list[list[HostJob]] = []
        self._sequence = 0
        self.tiles = 0
        self.event: Event | None = None

    def _make_block(self, setup: ExpertSetup) -> None:
        exact = self._math.exact
        tokens = max(setup.max_rows, setup.chunk_tokens)
        assert setup.config.moe is not None
        widest = int(padded_rows(np.array([tokens]), exact)[0])
        tiles = max(one.num_tiles for one in setup.bank.layouts)
        self._max_rows = 2 * widest + 64 * setup.config.moe.top_k
        self._io = IoBlock(
            setup.config.hidden_size,
            torch.float32 if exact else setup.numerics.dtype,
            max_items=setup.bank.num_experts,
            max_rows=self._max_rows,
            max_tokens=tokens,
            out_rows=self._max_rows + tiles * widest,
        )
        layers = native_layers(setup)
        if layers:
            self._out = self._io.out
            self._executor = NativeExecutor(setup.bank, layers, setup.threads)
        else:
            self._out = torch.zeros_like(self._io.out)
            self._executor = CpuExecutor(setup.bank, self._math, setup.threads)

    def start(self, work: LayerWork, jobs: list[HostJob]) -> None:
        """Launch `jobs`; nothing happens if there are none."""
        plan = work.plan
        jobs = sorted(jobs, key=lambda j: (plan.group_of[j.member], j.first, plan.place_of[j.member]))
        self._rounds = self._cut(work, jobs)
        self.event, self.tiles = None, sum(work.layout.num_tiles - j.first for j in jobs)
        if self._rounds:
            self._launch(work, self._rounds[0])

    def complete(self, work: LayerWork) -> None:
        """Wait for the answers of every round and add them to `work.z`."""
        rounds, self._rounds = self._rounds, []
        for number, jobs in enumerate(rounds):
            if number:
                self._launch(work, jobs)
            assert self.event is not None
            self._compute.wait(self.event)
            if self._io is not None:
                self._collect(work, jobs, self._io.out)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _cut(self, work: LayerWork, jobs: list[HostJob]) -> list[list[HostJob]]:
        rounds: list[list[HostJob]] = []
        room = 0
        for job in jobs:
            m = work.plan.groups[work.plan.group_of[job.member]].padded
            if not rounds or m > room:
                rounds.append([])
                room = self._max_rows if self._io is not None else 1 << 40
            rounds[-1].append(job)
            room -= m
        return rounds

    def _launch(self, work: LayerWork, jobs: list[HostJob]) -> None:
        if self._io is not None:
            self._write(work, jobs, self._io)
        self._host.wait(self._compute.record())
        if self._io is not None and self._executor is not None:
            fresh = self._executor.serve(self._io, self._out)
            if fresh and self._out is not self._io.out:
                self._host.copy(self._io.out[: self._used], self._out[: self._used])
        num_bytes, flops = 0.0, 0.0
        for first, some in groupby(sorted(jobs, key=lambda j: j.first), key=lambda j: j.first):
            cost = work.cost(np.array([job.member for job in some]), work.layout.num_tiles - first)
            num_bytes, flops = num_bytes + cost[0], flops + cost[1]
        self._host.charge(num_bytes, flops)
        self.event = self._host.record()

    def _write(self, work: LayerWork, jobs: list[HostJob], io: IoBlock) -> None:
        plan, tiles = work.plan, work.layout.num_tiles
        tokens = plan.num_tokens
        items, sources, rows, row, out_row = [], [], [], 0, 0
        for job in jobs:
            group = plan.groups[plan.group_of[job.member]]
            expert = work.layer * self._bank.num_experts + int(plan.experts[job.member])
            m = group.padded
            items.append((expert, job.first, tiles, row, m, out_row))
            sources.append(self._bank.record(expert).data_ptr())
            rows.append(group.rows[int(plan.place_of[job.member])])
            row += m
            out_row += m if job.first == 0 else m * (tiles - job.first)
        row_list = torch.cat(rows)
        row_list = torch.where(row_list == tokens, -1, row_list).int()
        self._used = out_row
        self._sequence += 1
        request = torch.tensor([self._sequence, work.layer, len(items), row, tokens], dtype=torch.int32)
        self._compute.copy(io.items[: len(items)], io.item_array(items, sources))
        self._compute.copy(io.rows[:row], row_list)
        self._compute.copy(io.x[:tokens], work.x[:tokens])
        self._compute.copy(io.request[:5], request)

    def _collect(self, work: LayerWork, jobs: list[HostJob], out: Tensor) -> None:
        plan, at = work.plan, 0
        for (number, first), some in groupby(jobs, key=lambda j: (int(plan.group_of[j.member]), j.first)):
            places = plan.place_of[[job.member for job in some]]
            group, n = plan.groups[number], len(places)
            parts = 1 if first == 0 else work.layout.num_tiles - first
            end = at + n * parts * group.padded
            partials = out[at:end].view(n, parts, group.padded, -1).transpose(0, 1)
            self._math.add(work.z, group, places, partials, first)
            at = end
