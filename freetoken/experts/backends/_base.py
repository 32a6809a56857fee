"""What all expert backends share: counting, planning rows, running tiles, the recorder's hook.

Subclasses say where records come from. One layer is in flight at a time, as a `LayerWork`.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import ExpertBackend, Routing
from freetoken.experts.math import pieces
from freetoken.experts.rows import Group, Ints, RowPlan, plan_rows
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork


class BaseBackend(ExpertBackend):
    """One layer is planned, started and completed at a time."""

    def __init__(self, setup: ExpertSetup) -> None:
        self.setup = setup
        self.bank, self.device = setup.bank, setup.device
        self.math = setup.arithmetic()
        self.stats = ExpertStats()
        self._work: LayerWork | None = None

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch | None) -> None:
        if self.on_routing is not None:
            self.on_routing(layer, routing.ids)
        self._work = self._plan(layer, x, routing)
        self.stats.requests += len(self._work.plan.experts)
        self._start(self._work)

    def finish(self, layer: int) -> Tensor:
        work, self._work = self._work, None
        assert work is not None and work.layer == layer
        self._complete(work)
        return self.math.reduce(work.z, work.plan, work.weights)

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        parts, step = [], self.setup.chunk_tokens
        for at in range(0, x.shape[0], step):
            cut = slice(at, at + step)
            self.begin(layer, x[cut], Routing(routing.ids[cut], routing.weights[cut]), None)
            parts.append(self.finish(layer))
            if at + step < x.shape[0]:
                yield
        return torch.cat(parts)

    def end_step(self, step_s: float) -> None:
        self.stats.steps += 1

    def close(self) -> None:
        """Release threads; idempotent."""

    def _start(self, work: LayerWork) -> None:
        """Everything that can be launched before anyone must wait."""
        raise NotImplementedError

    def _complete(self, work: LayerWork) -> None:
        """Wait for what is outstanding and finish the sums in `work.z`."""

    def _plan(self, layer: int, x: Tensor, routing: Routing, *, with_sums: bool = True) -> LayerWork:
        plan = plan_rows(routing.ids, self.math.exact)
        if self.bank.fills:
            self.bank.require((plan.experts + layer * self.bank.num_experts).tolist())
        layout = self.bank.layouts[layer]
        z = self.math.output(plan.num_rows if with_sums else 0, layout.hidden)
        return LayerWork(layer, layout, plan, self.math.gather_rows(x), z, routing.weights)

    def _run(self, work: LayerWork, members: Ints, view: Tensor, index: Ints, first: int, last: int) -> None:
        """Compute tiles [first, last) on the device and add them to the sums.

        members  int64 [n]   which of plan.experts, ascending
        view     uint8 [units, bytes], index int64 [n]: where each one's record lies
        """
        if not len(members) or first >= last:
            return
        self.device.charge(*work.cost(members, last - first))
        if not self.math.computes:
            return
        for number, group in enumerate(work.plan.groups):
            chosen = work.plan.group_of[members] == number
            places = work.plan.place_of[members[chosen]]
            if len(places):
                self._run_group(work, group, places, (view, index[chosen]), first, last)

    def _run_group(
        self, work: LayerWork, group: Group, places: Ints, where: tuple[Tensor, Ints], first: int, last: int
    ) -> None:
        view, index = where
        experts, tiles = pieces(group, work.layout, last - first)
        for i in range(0, len(places), experts):
            some = places[i : i + experts]
            part = group if len(some) == len(group.experts) else group.part(some)
            records = self.math.gather_records(view, index[i : i + experts])
            for a in range(first, last, tiles):
                partials = self.math.partials(work.layer, work.x, part, records, a, min(last, a + tiles))
                self.math.add(work.z, group, None if part is group else some, partials, a)


def everyone(plan: RowPlan) -> Ints:
    return np.arange(len(plan.experts))
