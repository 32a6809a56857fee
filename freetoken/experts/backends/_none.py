"""For models without routed experts: there is nothing to compute and nothing to move."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.errors import WeightsError
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import ExpertBackend, Routing


class NoExperts(ExpertBackend):
    name = "none"

    def __init__(self) -> None:
        self.stats = ExpertStats()

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch) -> None:
        raise WeightsError("This model has no routed experts.", code="no_experts")

    def finish(self, layer: int) -> Tensor:
        raise WeightsError("This model has no routed experts.", code="no_experts")

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        raise WeightsError("This model has no routed experts.", code="no_experts")
