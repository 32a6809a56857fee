"""Every expert is resident on the device: nothing is ever missing, nothing moves while serving.

On a device that shares host memory the bank's own records are used; otherwise a pool of all records is
filled once, when the backend is made.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.core.interfaces import ExpertBackend
from freetoken.experts.backends._base import BaseBackend, everyone
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.rows import Ints
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork


class FusedBackend(BaseBackend):
    name = "fused"

    def __init__(self, setup: ExpertSetup) -> None:
        super().__init__(setup)
        total = setup.num_records + 1
        self._pool = None
        if self.device.owns_memory:
            self._pool = self.device.pool(
                "experts", self.bank.slot_bytes, total, min_units=total, max_units=total
            )
            self._load()

    def _load(self) -> None:
        assert self._pool is not None
        view, fill = self._pool.view(), self.device.stream("fill")
        for layer in range(self.bank.num_layers):
            records = self.bank.layer(layer)
            self.bank.require(range(layer * self.bank.num_experts, (layer + 1) * self.bank.num_experts))
            for expert in range(self.bank.num_experts):
                unit = 1 + layer * self.bank.num_experts + expert
                fill.copy(view[unit][: records.shape[1]], records[expert])
        self.device.compute.wait(fill.record())

    def _where(self, layer: int, experts: Ints) -> tuple[Tensor, Ints]:
        if self._pool is None:
            return self.bank.layer(layer), experts
        return self._pool.view(), experts + (1 + layer * self.bank.num_experts)

    def _start(self, work: LayerWork) -> None:
        view, index = self._where(work.layer, work.plan.experts)
        self.stats.hits += len(index)
        self._run(work, everyone(work.plan), view, index, 0, work.layout.num_tiles)


def create(setup: ExpertSetup) -> ExpertBackend:
    if setup.device.kernels:
        return DeviceBackend(setup, "fused")
    return FusedBackend(setup)
