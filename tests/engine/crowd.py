"""Many sessions at once: histories that are edited and asked again, aborts, memory that changes meanwhile.

Knows an engine that is stepped by hand and nothing of its model: what a right answer is, `verify` says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from freetoken.core.request import FinishReason, Output, SamplingParams, Submit
from freetoken.engine.engine import Engine


@dataclass(frozen=True)
class Habits:
    """How a crowd behaves.

    ids           token ids that prompts are made of
    opening       tokens of a shared beginning, and of what each session adds to it
    longest       a history that reaches this starts over
    tokens        of an answer
    ebbing        chance that nobody asks until few are being answered
    steps         engine steps between two looks at what ended, at most
    aborting      chance of an abort at each look
    resizing      chance of a resize at each look
    budgets       (fixed bytes, bytes a unit, least units, most units): device memory of a resize
    """

    ids: range
    opening: tuple[int, int]
    longest: int
    tokens: int
    budgets: tuple[int, int, int, int]
    aborting: float = 0.05
    resizing: float = 0.06
    ebbing: float = 0.0
    steps: int = 5
    sessions: int = 64
    anchor_ids: tuple[int, ...] = ()


@dataclass
class Asked:
    """A request of a session, and what came of it."""

    name: str
    session: int
    ids: list[int]
    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def trace(self) -> list[tuple[int, float]]:
        """Token ids with the model's own log probabilities: equal traces mean equal arithmetic."""
        return [
            (token, said.logprob)
            for output in self.outputs
            for token, said in zip(output.token_ids, output.logprobs, strict=True)
        ]

    @property
    def is_aborted(self) -> bool:
        return self.outputs[-1].finish is FinishReason.ABORT


class Crowd:
    def __init__(self, engine: Engine, habits: Habits, seed: int) -> None:
        self.engine, self.habits, self.rng = engine, habits, random.Random(seed)
        engine._sink = self._take
        self.resizes = 0
        self.resized_at: dict[int, int] = {}
        self.bases = [self._tokens(habits.opening[0]) for _ in range(4)]
        self.histories = [self._fresh() for _ in range(habits.sessions)]
        self.open: dict[str, Asked] = {}
        self.counts = {"asked": 0, "reusing": 0, "across_a_resize": 0, "aborted": 0}

    def verify(self, asked: Asked) -> None:
        """Compare an answer, whole or aborted, with the cold one."""
        raise NotImplementedError

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.choice(self.habits.ids) for _ in range(count)]

    def _fresh(self) -> list[int]:
        return [*self.rng.choice(self.bases), *self._tokens(self.habits.opening[1])]

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.open[output.request_id].outputs.append(output)

    def _step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.read_inbox()
            if not self.engine.idle:
                self.engine.step()
            self.engine._hand_out()

    def ask(self, session: int) -> None:
        name, habits = f"q{self.counts['asked']}", self.habits
        self.counts["asked"] += 1
        ids = list(self.histories[session])
        anchors = tuple(sorted(self.rng.sample(range(1, len(ids) + 1), min(5, len(ids)))))
        params = SamplingParams(max_tokens=habits.tokens, temperature=0.0, logprobs=0, ignore_eos=True)
        self.open[name] = Asked(name, session, ids)
        where = (anchors, habits.anchor_ids, str(session))
        self.engine.submit(Submit(name, np.array(ids, np.int32), params, *where))

    def settle(self) -> None:
        """Check every answer that ended, and edit its session's history."""
        for asked in [a for a in self.open.values() if a.outputs and a.outputs[-1].finish is not None]:
            del self.open[asked.name]
            self.verify(asked)
            self.counts["aborted"] += asked.is_aborted
            reuses = asked.outputs[-1].cached_tokens > 0
            self.counts["reusing"] += reuses
            self.counts["across_a_resize"] += reuses and self._saw_a_resize(asked.session)
            self.resized_at[asked.session] = self.resizes
            self._edit(asked.session, [*asked.ids, *asked.tokens])

    def _saw_a_resize(self, session: int) -> bool:
        return self.resized_at.get(session, self.resizes) < self.resizes

    def _edit(self, session: int, history: list[int]) -> None:
        rng = self.rng
        cut = rng.randrange(self.habits.opening[0] // 2, len(history) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            history = [*history[:cut], *history[cut + rng.randrange(6) :]]
        elif kind == 1:
            history = [*history[:cut], *self._tokens(2), *history[cut + 2 :]]
        history += self._tokens(rng.randrange(1, 6))
        self.histories[session] = history if len(history) < self.habits.longest else self._fresh()

    def _memory(self) -> tuple[int, int]:
        return self.engine.scheduler.pages.num_units, self.engine.memory.num_slots

    def resize(self) -> None:
        """More or less device memory at the next safe point; a wish that doesn't fit changes nothing."""
        before = self._memory()
        fixed, unit, least, most = self.habits.budgets
        outcome = self.engine.resize(fixed + self.rng.randrange(least, most) * unit)
        for _ in range(200):
            self._step()
            if outcome.done():
                break
        assert outcome.done(), "a resize never came to its point"
        self.resizes += outcome.exception() is None and self._memory() != before

    def run(self, requests: int, at_once: int = 64) -> dict[str, int]:
        """Ask `requests` times; who owns which unit is checked after every round. Returns counts."""
        rng, ebbs = self.rng, False
        while self.counts["asked"] < requests or self.open:
            busy = {asked.session for asked in self.open.values()}
            idle = [s for s in range(self.habits.sessions) if s not in busy]
            ebbs = len(self.open) >= 8 and (ebbs or rng.random() < self.habits.ebbing)
            while self.counts["asked"] < requests and len(self.open) < at_once and idle and not ebbs:
                self.ask(idle.pop(rng.randrange(len(idle))))
            self._step(rng.randrange(1, self.habits.steps + 1))
            if rng.random() < self.habits.aborting and self.open:
                self.engine.abort(rng.choice(sorted(self.open)))
            if rng.random() < self.habits.resizing:
                self.resize()
            self.settle()
            self.engine.scheduler.check()
        while not self.engine.idle:
            self._step()
        scheduler = self.engine.scheduler
        self.counts |= scheduler.reuse.snapshot()
        self.counts |= {"preemptions": scheduler.num_preemptions, "resizes": self.resizes}
        return self.counts
