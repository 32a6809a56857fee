"""Small builders for tests that run whole models through the engine, stepped by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from freetoken.core.batch import Segment
from freetoken.core.options import Options
from freetoken.core.request import Output, SamplingParams, Submit
from freetoken.engine.build import Built, build

from .sessions import Turns, conversation

Trace = list[tuple[int, float]]
"""Token ids with the model's own log probabilities: equal traces mean equal arithmetic."""


def text_ids(built: Built, seed: int, n: int) -> np.ndarray:
    """n token ids that look like text to the demo model."""
    rng = random.Random(seed)
    words = ["the", "a", "user", "asks", "tool", "file", "number", "what", "is", "define", "weather", "sum"]
    text = " ".join(rng.choice(words) + rng.choice(["", ".", ",", " 12"]) for _ in range(n))
    return built.codec.tokenizer.encode(text)[:n]


@dataclass
class Served:
    """A built engine that runs in the test's own thread."""

    built: Built
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = self.built.engine
        self.engine._sink = self._take

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.outputs.setdefault(output.request_id, []).append(output)

    def submit(self, name: str, ids: np.ndarray, tokens: int = 12, **params) -> None:
        anchors, group = params.pop("anchors", ()), params.pop("group", "")
        params = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, **params}
        sampling = SamplingParams(max_tokens=tokens, **params)
        self.engine.submit(Submit(name, ids, sampling, anchors, group=group))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.read_inbox()
            if not self.engine.idle:
                self.engine.step()
            self.engine._hand_out()

    def run(self, between: Callable[[int], None] = lambda step: None, limit: int = 20000) -> None:
        for i in range(limit):
            between(i)
            self.step()
            if self.engine.idle:
                return
        raise AssertionError("the engine never came to rest")

    def trace(self, name: str) -> Trace:
        return [
            (t, p.logprob)
            for o in self.outputs.get(name, [])
            for t, p in zip(o.token_ids, o.logprobs, strict=True)
        ]

    def close(self) -> None:
        self.engine.close()


def serve(**wishes) -> Served:
    return Served(build(Options(**wishes)))


def say(served: Served, name: str, turns: Turns, tokens: int, group: str = "") -> tuple[int, ...]:
    """Submit a conversation as the codec renders it, with its anchors; returns the prompt's ids."""
    prompt = served.built.codec.encode(conversation(turns))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    anchors = (prompt.anchor_positions, prompt.anchor_ids)
    served.engine.submit(Submit(name, prompt.ids, params, *anchors, group))
    return tuple(int(i) for i in prompt.ids)


def alone(ids_seed: int, num_prompt: int, tokens: int = 12, **wishes) -> Trace:
    """One request's trace with an engine of its own."""
    served = serve(**wishes)
    served.submit("a", text_ids(served.built, ids_seed, num_prompt), tokens)
    served.run()
    served.close()
    return served.trace("a")


def teacher_forced(built: Built, ids: np.ndarray, chunks: Sequence[int]) -> torch.Tensor:
    """float32 [len(chunks), V]: logits after each chunk when exactly `ids` are fed in pieces."""
    pages = list(range(1, len(ids) // built.plan.page_size + 2))
    runner, out, start = built.engine.runner, [], 0
    for n in chunks:
        segment = Segment(ids[start : start + n], start, pages, state_id=1, row=1)
        out.append(runner.launch([segment]).logits[0].clone())
        start += n
    return torch.stack(out)
