"""A model that says a script and counts what it computes: real control code at full lengths.

Its KV pages and states are small but real units, so pages, checkpoints and budgets work as ever.
"""

from __future__ import annotations

import numpy as np
import torch

from freetoken.core.batch import Batch
from freetoken.core.request import SamplingParams, Submit

from .toy import Bench, ToyModel

VOCAB = 8192


class CountingModel(ToyModel):
    """The token behind position p of request r is `scripts[r][p]`, or 1 where the script ends."""

    def __init__(self, kv, state) -> None:
        super().__init__(kv, state)
        self.scripts: dict[int, np.ndarray] = {}
        self.prefilled: dict[int, int] = {}

    def embed(self, batch: Batch):
        self._batch = batch
        for s in batch.segments:
            if not s.is_decode:
                self.prefilled[s.request] = self.prefilled.get(s.request, 0) + len(s.token_ids)
        return torch.zeros(batch.num_rows, 1)

    def mix(self, layer: int, h, batch: Batch):
        return h

    def head(self, h, rows):
        logits = torch.zeros(len(rows), VOCAB)
        wanted = [s for s in self._batch.segments if s.wants_logits]
        for i, s in enumerate(wanted):
            script, at = self.scripts.get(s.request, ()), s.start + len(s.token_ids)
            logits[i, int(script[at]) if at < len(script) else 1] = 1.0
        return logits


class Counting(Bench):
    """An engine that computes nothing at lengths of tens of thousands of tokens."""

    def __init__(self, **wishes) -> None:
        sizes = {"pages": 60000, "slots": 400, "units": 8, "max_prefill_length": 2048, "context": 100000}
        super().__init__(**{**sizes, "model": CountingModel, **wishes})
        self.count = 0
        self.known: list[np.ndarray] = []

    def say(self, name: str, prompt, whole: np.ndarray, group: str = "") -> int:
        """Submit a prompt whose answer makes it `whole`; returns the request's number."""
        number, self.count = self.count, self.count + 1
        self.model.scripts[number] = whole
        params = SamplingParams(
            temperature=0.0, max_tokens=max(len(whole) - len(prompt.ids), 1), ignore_eos=True
        )
        anchors = (prompt.anchor_positions, prompt.anchor_ids)
        self.engine.submit(Submit(name, prompt.ids, params, *anchors, group))
        return number

    def bound(self, ids: np.ndarray) -> int:
        """Tokens that nothing known before could spare."""
        return len(ids) - max([min(common(ids, k), len(ids) - 1) for k in self.known], default=0)


def common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
