"""An engine driven in this process, without HTTP and text: ids in, ids with their times out.

What the engine benches share. Times are read on the device's clock when a step's tokens are handed over, so
they mean the same on a simulated device. Invariant: a failed request raises in the thread that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from freetoken.core.request import Output, SamplingParams, Submit, TokenLogprob
from freetoken.engine.build import Built

PATIENCE_S = 600.0


@dataclass
class Asked:
    """A request: when it was submitted, when each token came, and what ended it."""

    name: str
    submitted_s: float
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    done: bool = False
    error: BaseException | None = None

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0] - self.submitted_s

    @property
    def tok_s(self) -> float:
        """Tokens a second behind the first one."""
        spent = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / spent if spent > 0 else 0.0


@dataclass(frozen=True)
class Mark:
    """A moment of several requests: the clock, their tokens so far, the experts' counters."""

    time_s: float
    tokens: int
    counters: dict[str, Any]


@dataclass
class Window:
    """From the step at which all of `asked` have `first` tokens, to the one at which all have `last`."""

    asked: Sequence[Asked]
    first: int
    last: int
    start: Mark | None = None
    end: Mark | None = None

    @property
    def seconds(self) -> float:
        assert self.start and self.end
        return self.end.time_s - self.start.time_s

    @property
    def tokens(self) -> int:
        assert self.start and self.end
        return self.end.tokens - self.start.tokens

    def used(self, name: str) -> float:
        """What a counter grew by."""
        assert self.start and self.end
        return float(self.end.counters[name] - self.start.counters[name])


class Driven:
    """Runs a built engine in its own thread while the block lasts; closes it at the end."""

    def __init__(self, built: Built) -> None:
        self.built, self._clock = built, built.device.clock
        self._asked: dict[str, Asked] = {}
        self._news = threading.Condition()
        self._number = 0
        self._window: Window | None = None

    def __enter__(self) -> Driven:
        self.built.engine.start(self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.built.close()

    def submit(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        logprobs: int | None = None,
        group: str = "",
        anchors: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Asked:
        """Ask for exactly `tokens` greedy tokens behind the prompt; anchors: its positions, answer's ids."""
        self._number += 1
        name = f"r{self._number}"
        asked = self._asked[name] = Asked(name, self._clock.now())
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
        ids = np.asarray(prompt, np.int32)
        self.built.engine.submit(Submit(name, ids, params, *anchors, group=group))
        return asked

    def wait(self, asked: Sequence[Asked], tokens: int | None = None) -> None:
        """Wait until each has so many tokens (None: has ended)."""

        def ready() -> bool:
            return all(a.done or a.error or (tokens is not None and len(a.ids) >= tokens) for a in asked)

        with self._news:
            if not self._news.wait_for(ready, PATIENCE_S):
                raise TimeoutError(f"no answer within {PATIENCE_S:g} s")
        for one in asked:
            if one.error is not None:
                raise one.error

    def run(
        self,
        prompt: Sequence[int],
        tokens: int,
        anchors: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Asked:
        asked = self.submit(prompt, tokens, anchors=anchors)
        self.wait([asked])
        return asked

    def window(self, asked: Sequence[Asked], first: int, last: int) -> Window:
        """Watch requests just submitted, and wait until the window is over."""
        with self._news:
            window = self._window = Window(asked, first, last)
        self.wait(asked)
        with self._news:
            self._window = None
        return window

    def _watch(self, window: Window) -> None:
        """Engine's thread, after a step: set the marks.

        Both times are read before counting, which waits for the step in flight: it belongs behind either.
        """
        fewest = min(len(one.ids) for one in window.asked)
        tokens = sum(len(one.ids) for one in window.asked)
        if window.start is None and fewest >= window.first:
            now = self._clock.now()
            window.start = Mark(now, tokens, self.counters())
        elif window.start is not None and window.end is None and fewest >= window.last:
            now = self._clock.now()
            window.end = Mark(now, tokens, self.counters())

    def counters(self) -> dict[str, Any]:
        """What the experts have counted; in the engine's thread, or while nothing runs."""
        experts = self.built.engine.runner.experts
        experts.settle()
        return {**vars(experts.stats), "engine_steps": self.built.engine.stats.steps}

    def _take(self, outputs: list[Output]) -> None:
        now = self._clock.now()
        with self._news:
            for output in outputs:
                one = self._asked[output.request_id]
                one.ids += output.token_ids
                one.times_s += [now] * len(output.token_ids)
                one.logprobs += output.logprobs
                one.error = output.error
                one.cached = output.cached_tokens or one.cached
                one.done = output.finish is not None
            if self._window is not None:
                self._watch(self._window)
            self._news.notify_all()
