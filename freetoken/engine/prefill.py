"""PrefillJob: one macro-chunk through the model, layer by layer instead of chunk by chunk.

Each layer sees all sub-chunks before the next begins, so the expert pool crosses the link at most
once per macro-chunk. `advance` runs one unit, a (layer, sub-chunk) or a group of experts; between
units the engine may interpose decode steps. The commit unit is the macro-chunk: nobody counts its
tokens as computed before `logits` exists, and a dropped job leaves no trace but overwritten pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from freetoken.core.batch import Segment
from freetoken.core.interfaces import Device, Event, Routing
from freetoken.engine.runner import Runner

UNITS_AHEAD = 4
"""Units that a device is given before it is through with the first of them: enough to keep it busy."""


def split_segments(segments: Sequence[Segment], chunk_tokens: int) -> list[list[Segment]]:
    """Cut a macro-chunk into sub-chunks of at most `chunk_tokens` rows, in order of position."""
    chunks: list[list[Segment]] = []
    room = 0
    for segment in segments:
        done = 0
        while done < len(segment.token_ids):
            if room == 0:
                chunks.append([])
                room = chunk_tokens
            n = min(room, len(segment.token_ids) - done)
            last = done + n == len(segment.token_ids)
            ids = segment.token_ids[done : done + n]
            wants = segment.wants_logits and last
            chunks[-1].append(replace(segment, token_ids=ids, start=segment.start + done, wants_logits=wants))
            done += n
            room -= n
    return chunks


class PrefillJob:
    """A layer cursor over a macro-chunk. `logits` float32 [R, V] exists once `done`."""

    def __init__(self, runner: Runner, segments: Sequence[Segment], chunk_tokens: int) -> None:
        self.segments = tuple(segments)
        self.num_tokens = sum(len(s.token_ids) for s in segments)
        self.logits: Tensor | None = None
        self._model, self._experts = runner.model, runner.experts
        self._batches = [runner.keep(chunk) for chunk in split_segments(segments, chunk_tokens)]
        self._units = self._run()
        self._experts.begin_job(self.num_tokens)
        self._open = True
        self._unit_s = 0.0

    @property
    def done(self) -> bool:
        return self.logits is not None

    def advance(self) -> bool:
        """Run one unit. Returns False once the job is complete, that is enqueued to its end."""
        try:
            with torch.inference_mode():
                next(self._units)
        except StopIteration:
            return False
        return True

    def advance_for(self, device: Device, seconds: float) -> None:
        """Run units until the device will have spent `seconds` on them, by those that it is through with.

        Never more than the mixers of two sub-chunks, whatever the time.

        Enqueueing a unit takes the host less than the device needs for it, and units differ: while the link
        is the limit they take thrice as long. So the host keeps pace with the device.
        """
        start, first_s, through = device.clock.now(), 0.0, 0
        waiting: deque[Event] = deque()
        for _ in range(2 * self._model.config.num_layers):
            if not self.advance():
                return
            waiting.append(device.compute.record())
            ahead = UNITS_AHEAD if self._unit_s else 1
            while waiting and (len(waiting) > ahead or waiting[0].done()):
                at, through = waiting.popleft().time_s(), through + 1
                if through == 1:
                    first_s = at  # whatever ran before it is in there, too
                else:
                    self._unit_s = (at - first_s) / (through - 1)
            if device.clock.now() - start + len(waiting) * self._unit_s >= seconds:
                return

    def close(self) -> None:
        """End or drop the job; what it has enqueued still runs. Idempotent."""
        if self._open:
            self._open = False
            self._units.close()
            self._experts.end_job()

    def _run(self) -> Generator[None, None, None]:
        hidden = [self._model.embed(batch) for batch in self._batches]
        for layer, moe_layer in enumerate(self._model.config.moe_layer_of):
            xs: list[Tensor] = []
            routings: list[Routing] = []
            for i, batch in enumerate(self._batches):
                h = self._model.mix(layer, hidden[i], batch)
                if moe_layer < 0:
                    h = self._model.dense(layer, h)
                else:
                    x, routing = self._model.route(layer, h, batch)
                    xs.append(x)
                    routings.append(routing)
                hidden[i] = h
                yield
            if moe_layer >= 0:
                yield from self._experts_of(layer, moe_layer, hidden, xs, routings)
        self.logits = self._logits(hidden)

    def _experts_of(
        self, layer: int, moe_layer: int, hidden: list[Tensor], xs: list[Tensor], routings: list[Routing]
    ) -> Generator[None, None, None]:
        whole = Routing(torch.cat([r.ids for r in routings]), torch.cat([r.weights for r in routings]))
        routed = yield from self._experts.stream_layer(moe_layer, torch.cat(xs), whole)
        start = 0
        for i, x in enumerate(xs):
            hidden[i] = self._model.combine(layer, hidden[i], x, routed[start : start + len(x)])
            start += len(x)

    def _logits(self, hidden: list[Tensor]) -> Tensor:
        parts = [
            self._model.head(h, batch.logit_rows)
            for h, batch in zip(hidden, self._batches, strict=True)
            if len(batch.logit_rows)
        ]
        vocab = self._model.config.vocab_size
        return torch.cat(parts) if parts else torch.empty(0, vocab)
