"""Decode steps as captured graphs, one for each batch bucket.

A step's forward touches fixed addresses only, so it is captured once and replayed: no launch costs the
host anything then. Captured when a bucket is first needed, on a batch of dead rows, which changes nothing.
Owns graphs and their memory. Steps that want more than tokens (saves, no logits) are not its business.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from freetoken.core import collector
from freetoken.core.batch import Batch, BatchBuffers, Segment
from freetoken.core.interfaces import Device, ExpertBackend, Model
from freetoken.core.log import logger
from freetoken.core.units import format_bytes
from freetoken.kernels._rehearsal import rehearse

log = logger("graphs")


class DecodeGraphs:
    """`launch` runs a decode step of up to `max_rows` sequences."""

    def __init__(
        self,
        model: Model,
        experts: ExpertBackend,
        device: Device,
        buffers: BatchBuffers,
        max_rows: int,
    ) -> None:
        self._model, self._experts, self._device = model, experts, device
        self._buffers, self._max_rows = buffers, max_rows
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._rehearsed: set[int] = set()
        self._memory: tuple[int, int] | None = None
        self.capture_s = 0.0

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether a step is one token of each sequence and nothing else."""
        return (
            len(segments) <= self._max_rows
            and self._experts.on_routing is None
            and all(len(s.token_ids) == 1 and s.wants_logits and not s.saves for s in segments)
        )

    def launch(self, segments: Sequence[Segment]) -> tuple[Batch, Tensor]:
        """Enqueue the step: its batch and float32 [B, V] logits, which live until the next launch."""
        rows = self._device.bucket(len(segments))
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows)
        graph, logits = self._graphs[rows]
        batch = self._buffers.fill(segments, rows, resolve=False)
        self._experts.wake()
        graph.replay()
        return batch, logits[: len(segments)]

    def rehearse(self, rows: int) -> Tensor:
        """Run a step of `rows` dead rows as `launch` captures it; nothing of it is kept. Its logits."""
        self._rehearsed.add(rows)
        self._buffers.fill([], rows, resolve=False)
        return self._forward(self._buffers.batch(rows, rows, 0, (), True))

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        started, before = time.perf_counter(), torch.cuda.memory_allocated()
        if self._device.compiles and rows not in self._rehearsed:
            # Everybody who is being answered waits for these kernels.
            rehearse(lambda rehearsal: self.rehearse(rows))
        self._buffers.fill([], rows, resolve=False)
        batch = self._buffers.batch(rows, rows, 0, (), True)
        self._forward(batch)  # compiles what is missing and takes workspaces
        self._device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._forward(batch)
        self._memory = graph.pool()
        took = time.perf_counter() - started
        self.capture_s += took
        log.info(
            "captured decode of %d rows in %.2f s, %s",
            rows,
            took,
            format_bytes(max(0, torch.cuda.memory_allocated() - before)),
        )
        return graph, logits

    def _forward(self, batch: Batch) -> Tensor:
        self._buffers.resolve(batch.num_rows)
        self._experts.begin_step()
        h = self._model.hidden(batch, self._experts)
        return self._model.head(h, None)


@contextlib.contextmanager
def _no_garbage() -> Generator[None]:
    """A graph that is collected while another is captured spoils the capture."""
    gc.collect()
    with collector.paused():
        yield
