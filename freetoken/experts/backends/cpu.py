"""Every routed expert is computed by the host executor, in place: the device holds none.

Where the device's memory is the host's, the native library takes a layer whole; else the work list goes
through the page that device and host share.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.interfaces import ExpertBackend, Routing
from freetoken.experts.backends._base import BaseBackend
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.host_branch import HostBranch, HostJob
from freetoken.experts.native_executor import NativeExecutor, native_layers
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork
from freetoken.kernels.gating import add_routed
from freetoken.native.library import library
from freetoken.native.ops import Moe


class CpuBackend(BaseBackend):
    name = "cpu"

    def __init__(self, setup: ExpertSetup) -> None:
        super().__init__(setup)
        self._host = HostBranch(setup)

    def _start(self, work: LayerWork) -> None:
        self._host.start(work, [HostJob(i, 0) for i in range(len(work.plan.experts))])
        self._count(work.layer, len(work.plan.experts))

    def _count(self, layer: int, experts: int) -> None:
        one = self.bank.layouts[layer]
        tiles = experts * one.num_tiles
        self.stats.misses += experts
        self.stats.missing_tiles += tiles
        self.stats.cpu_tiles += tiles
        self.stats.host_bytes += tiles * one.tile_bytes

    def _complete(self, work: LayerWork) -> None:
        self._host.complete(work)

    def close(self) -> None:
        self._host.close()


class WholeLayers(CpuBackend):
    """One native call a layer, done when `begin` returns."""

    def __init__(self, setup: ExpertSetup, executor: NativeExecutor) -> None:
        BaseBackend.__init__(self, setup)
        self._executor = executor
        self._y: Tensor | None = None

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch | None) -> None:
        if self.on_routing is not None:
            self.on_routing(layer, routing.ids)
        if not self.bank.arrivals.complete:
            self._postpone()
            first = layer * self.bank.num_experts
            self.bank.require([first + int(e) for e in routing.ids.unique() if e >= 0])
        self._y, job = self._executor.run_layer(layer, x, routing)
        self._count_job(layer, job)
        lib = library()
        if lib is not None and lib.tape is not None:
            lib.tape.afterwards(partial(self._count_job, layer, job))

    def _count_job(self, layer: int, job: Moe) -> None:
        self.stats.requests += job.visited
        self._count(layer, job.visited)

    @staticmethod
    def _postpone() -> None:
        lib = library()
        if lib is not None and lib.tape is not None:
            lib.tape.refuse("experts that are still arriving", final=False)

    def finish(self, layer: int) -> Tensor:
        y, self._y = self._y, None
        assert y is not None
        return y

    def add(self, layer: int, h: Tensor) -> Tensor:
        return add_routed(h, self.finish(layer))

    def close(self) -> None:
        self._executor.close()


def create(setup: ExpertSetup) -> ExpertBackend:
    if setup.device.kernels:
        return DeviceBackend(setup, "cpu")
    if setup.device.in_host_memory and not setup.bank.phantom and (layers := native_layers(setup)):
        return WholeLayers(setup, NativeExecutor(setup.bank, layers, setup.threads))
    return CpuBackend(setup)
