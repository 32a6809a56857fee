"""Batch -> logits -> tokens, in two phases: `launch` enqueues, `collect` reads.

Owns the model, the batch buffers and the sampler. Knows segments, not requests. Nothing between
`launch` and `collect` waits for the device, so the host prepares step n+1 while n runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.batch import Batch, BatchBuffers, Segment
from freetoken.core.interfaces import Device, ExpertBackend, Model
from freetoken.core.request import TokenLogprob
from freetoken.engine import programs
from freetoken.engine.graphs import DecodeGraphs
from freetoken.engine.programs import DecodePrograms
from freetoken.engine.sampler import Draw, Sampler
from freetoken.engine.slips import Sampled
from freetoken.engine.threads import ThreadTrial


@dataclass(frozen=True)
class Launched:
    """A forward under way: logits float32 [R, V], one row for each segment that wants logits."""

    batch: Batch
    logits: Tensor


@dataclass(frozen=True)
class Token:
    """One drawn token on the host; `is_bad` means that its logits were not finite."""

    token_id: int
    logprob: TokenLogprob | None
    is_bad: bool


class Runner:
    def __init__(
        self,
        model: Model,
        experts: ExpertBackend,
        device: Device,
        sampler: Sampler,
        threads: ThreadTrial | None = None,
    ) -> None:
        self.model, self.experts, self.device, self.sampler = model, experts, device, sampler
        self._buffers: dict[bool, BatchBuffers] = {}
        self._max_pages = self._page_size = 0
        self._graphs: DecodeGraphs | DecodePrograms | None = None
        self._threads, self._rows = threads, 0

    @property
    def programs(self) -> DecodePrograms | None:
        """The recorded decode steps of a CPU."""
        return self._graphs if isinstance(self._graphs, DecodePrograms) else None

    @property
    def capture_s(self) -> float:
        """Seconds spent on capturing steps as graphs."""
        return self._graphs.capture_s if isinstance(self._graphs, DecodeGraphs) else 0.0

    def reserve(self, max_running: int, max_rows: int, max_pages: int, page_size: int) -> None:
        """Allocate the fixed buffers: one set for decode, one for batches with prefill rows."""
        self._max_pages, self._page_size = max_pages, page_size
        for is_decode, rows in ((True, max_running), (False, max_rows + max_running)):
            rows = max(rows, self.device.bucket(max_running))
            self._buffers[is_decode] = BatchBuffers(
                rows, max(rows if is_decode else max_running, 1), max_pages, page_size,
                self.device.torch_device, self.sampler.last_tokens,
            )  # fmt: skip

        if self.device.captures:
            buffers = self._buffers[True]
            self._graphs = DecodeGraphs(self.model, self.experts, self.device, buffers, max_running)
        elif programs.supported(self.device):
            self._graphs = DecodePrograms(self.model, self.experts, self._buffers[True])

    def fill(self, segments: Sequence[Segment]) -> Batch:
        """Copy segments into the buffers of their phase; a batch lives until the next of its phase."""
        is_decode = all(len(s.token_ids) == 1 for s in segments)
        bucket = self.device.bucket(len(segments)) if is_decode else 0
        return self._buffers[is_decode].fill(segments, bucket)

    def keep(self, segments: Sequence[Segment]) -> Batch:
        """Copy segments into buffers of their own: a job's batches all live until it ends."""
        rows = sum(len(s.token_ids) for s in segments)
        pages = min(self._max_pages, max(len(s.page_ids) for s in segments))
        place, last = self.device.torch_device, self.sampler.last_tokens
        return BatchBuffers(rows, len(segments), pages, self._page_size, place, last).fill(segments)

    def launch(self, segments: Sequence[Segment]) -> Launched:
        """Enqueue a forward over `segments`."""
        with torch.inference_mode():
            alike = self._graphs is not None and self._graphs.fits(segments)
            self._rows = len(segments) if alike else 0
            if self._graphs is not None and alike:
                return Launched(*self._graphs.launch(segments))
            batch = self.fill(segments)
            self.experts.wake()
            return Launched(batch, self.model.forward(batch, self.experts))

    def rehearse(self, segments: Sequence[Segment]) -> None:
        """The forward that `launch` runs, without capturing it, and draws from what it would give."""
        with torch.inference_mode():
            if isinstance(self._graphs, DecodeGraphs) and self._graphs.fits(segments):
                logits = self._graphs.rehearse(self.device.bucket(len(segments)))
            else:
                logits = self.model.forward(self.fill(segments), self.experts)
            self.sampler.rehearse(logits)

    def sample(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Sampled:
        """Draw from the given logit rows only: what ended meanwhile is not sampled."""
        with torch.inference_mode():
            return self.sampler.sample(logits, draws, rows)

    def end_step(self, seconds: float) -> None:
        """The step launched last took so long."""
        self.experts.end_step(seconds)
        if self._threads is not None:
            self._threads.note(self._rows, seconds)

    def collect(self, sampled: Sampled) -> list[Token]:
        """Wait for a step's tokens. The one place where the engine waits for the device."""
        ids, bad = sampled.read()
        return [Token(t, p, b) for t, p, b in zip(ids, sampled.logprobs, bad, strict=True)]
