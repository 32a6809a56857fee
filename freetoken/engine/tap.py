"""A tap on routing: an expert backend that passes everything on and tells who was routed where.

Used by `--record-routing`. Knows no trace format; the sink gets plain arrays, one call a layer-step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from freetoken.core.batch import Batch, Segment
from freetoken.core.interfaces import ExpertBackend, Routing

Sink = Callable[[int, Any, Any, Any], None]


def _seen(layer: int, ids: Tensor) -> None:
    """Somebody wants to see every step's routing."""


class RoutingTap(ExpertBackend):
    """Wraps `inner`. sink(layer, ids int32 [T, k], requests int32 [T], phases uint8 [T])."""

    def __init__(self, inner: ExpertBackend, sink: Sink) -> None:
        self.inner, self._sink = inner, sink
        self.name, self.stats = inner.name, inner.stats
        inner.on_routing = _seen  # steps that were recorded or captured would pass the tap by
        self._job: Sequence[Segment] = ()

    def expect_job(self, segments: Sequence[Segment]) -> None:
        """The next `stream_layer` calls carry the rows of these segments."""
        self._job = segments

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch) -> None:
        self._tell(layer, routing, batch.segments)
        self.inner.begin(layer, x, routing, batch)

    def finish(self, layer: int) -> Tensor:
        return self.inner.finish(layer)

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        self._tell(layer, routing, self._job)
        return self.inner.stream_layer(layer, x, routing)

    def _tell(self, layer: int, routing: Routing, segments: Sequence[Segment]) -> None:
        lengths = [len(s.token_ids) for s in segments]
        requests = np.repeat(np.array([s.request for s in segments], np.int32), lengths)
        phases = np.repeat(np.array([s.is_decode for s in segments], np.uint8), lengths)
        ids = routing.ids.cpu().numpy()[: len(requests)]
        self._sink(layer, ids, requests, phases)

    def begin_job(self, num_tokens: int) -> None:
        self.inner.begin_job(num_tokens)

    def end_job(self) -> None:
        self.inner.end_job()

    def absent_bytes(self, num_tokens: int) -> int:
        return self.inner.absent_bytes(num_tokens)

    def begin_step(self) -> None:
        self.inner.begin_step()

    def wake(self) -> None:
        self.inner.wake()

    def rest(self) -> None:
        self.inner.rest()

    def end_step(self, step_s: float) -> None:
        self.inner.end_step(step_s)

    def settle(self) -> None:
        self.inner.settle()

    def freeze(self, frozen: bool) -> None:
        self.inner.freeze(frozen)

    def resize(self, num_slots: int) -> None:
        self.inner.resize(num_slots)

    def close(self) -> None:
        self.inner.close()
