"""Slots on the device, and every missing expert comes over the link before it is computed."""

from __future__ import annotations

from freetoken.core.interfaces import ExpertBackend
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.backends._resident import ResidentBackend, Step
from freetoken.experts.rows import Ints
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.work import LayerWork


class OffloadBackend(ResidentBackend):
    name = "offload"

    def _divide(self, work: LayerWork, step: Step, missing: Ints) -> None:
        self.stats.filled_tiles += work.layout.num_tiles * len(missing) - int(step.have[missing].sum())
        self._fill_whole(work, step, missing.tolist())


def create(setup: ExpertSetup) -> ExpertBackend:
    if setup.device.kernels:
        return DeviceBackend(setup, "offload")
    assert setup.policy is not None
    return OffloadBackend(setup, setup.policy)
