"""Every routed expert is computed by the host executor, in place: the device holds none."""

from __future__ import annotations

from freetoken.core.errors import ConfigError
from freetoken.core.interfaces import ExpertBackend
from freetoken.experts.backends._base import BaseBackend
from freetoken.experts.host_branch import HostBranch, HostJob
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork


class CpuBackend(BaseBackend):
    name = "cpu"

    def __init__(self, setup: ExpertSetup) -> None:
        super().__init__(setup)
        self._host = HostBranch(setup)

    def _start(self, work: LayerWork) -> None:
        num = len(work.plan.experts)
        tiles = num * work.layout.num_tiles
        self._host.start(work, [HostJob(i, 0) for i in range(num)])
        self.stats.misses += num
        self.stats.missing_tiles += tiles
        self.stats.cpu_tiles += tiles
        self.stats.host_bytes += tiles * work.layout.tile_bytes

    def _complete(self, work: LayerWork) -> None:
        self._host.complete(work)

    def close(self) -> None:
        self._host.close()


def create(setup: ExpertSetup) -> ExpertBackend:
    if setup.device.kernels:
        raise ConfigError(
            "The CPU alone can't compute experts beside a GPU yet.",
            code="unsupported_on_gpu",
            hint="Use --moe-backend hybrid, or --device cpu.",
            param="moe_backend",
        )
    return CpuBackend(setup)
