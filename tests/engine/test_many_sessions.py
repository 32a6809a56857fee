"""Many sessions at once over the toy: edits, aborts, preemption, resizes; every answer is the cold one's."""

import random

import pytest

from freetoken.core.machine import preset
from freetoken.core.request import FinishReason
from freetoken.devices.sim import SimDevice

from .toy import Bench, expected


class Crowd:
    """Sessions that each keep a history of tokens, edit it and ask again."""

    def __init__(self, seed: int, sessions: int, **wishes) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(max_running_requests=8, max_prefill_length=32, kv_reserve_tokens=16, **wishes)
        self.resizes = 0
        self.resized_at = [0] * sessions
        self.bases = [self._tokens(20) for _ in range(4)]
        self.histories = [[*self.rng.choice(self.bases), *self._tokens(6)] for _ in range(sessions)]
        self.open: dict[str, tuple[int, list[int]]] = {}
        self.aborted: set[str] = set()
        self.counts = {"asked": 0, "reusing": 0, "across_a_resize": 0, "aborted": 0}

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 97) for _ in range(count)]

    def ask(self, session: int) -> None:
        name = f"q{self.counts['asked']}"
        self.counts["asked"] += 1
        ids = list(self.histories[session])
        anchors = sorted(self.rng.sample(range(1, len(ids) + 1), min(5, len(ids))))
        self.bench.submit(name, ids, anchors, (7, 8, 9), group=str(session), max_tokens=16, ignore_eos=True)
        self.open[name] = (session, ids)

    def settle(self) -> None:
        """Check every answer that ended, and edit its session's history."""
        for name in [n for n in self.open if n in self.bench.outputs and self.bench.finish(n) is not None]:
            session, ids = self.open.pop(name)
            tokens, last = self.bench.tokens(name), self.bench.outputs[name][-1]
            if last.finish is FinishReason.ABORT:
                assert tokens == expected(ids, 16, eos=False)[: len(tokens)]
                self.counts["aborted"] += 1
            else:
                assert tokens == expected(ids, 16, eos=False), name
            self.counts["reusing"] += last.cached_tokens > 0
            is_across = self.resized_at[session] < self.resizes
            self.counts["across_a_resize"] += last.cached_tokens > 0 and is_across
            self.resized_at[session] = self.resizes
            del self.bench.outputs[name]
            self._edit(session, [*ids, *tokens])

    def _edit(self, session: int, history: list[int]) -> None:
        rng = self.rng
        cut = rng.randrange(10, len(history) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            history = [*history[:cut], *history[cut + rng.randrange(6) :]]
        elif kind == 1:
            history = [*history[:cut], *self._tokens(2), *history[cut + 2 :]]
        history += self._tokens(rng.randrange(1, 6))
        self.histories[session] = (
            history if len(history) < 90 else [*rng.choice(self.bases), *self._tokens(6)]
        )

    def resize(self) -> None:
        """More or less device memory at the next safe point; a wish that doesn't fit changes nothing."""
        plan, before = self.bench.engine.plan, self.bench.scheduler.pages.num_units
        page_bytes = self.bench.engine.memory._sizes.page_bytes
        fixed = plan.memory.activation_bytes + plan.memory.num_states * plan.memory.state_bytes
        outcome = self.bench.engine.resize(fixed + self.rng.randrange(64, 130) * page_bytes)
        for _ in range(200):
            self.bench.steps()
            if outcome.done():
                break
        assert outcome.done(), "a resize never came to its point"
        self.resizes += outcome.exception() is None and self.bench.scheduler.pages.num_units != before

    def run(self, requests: int, at_once: int) -> None:
        while self.counts["asked"] < requests or self.open:
            idle = [s for s in range(len(self.histories)) if s not in {s for s, _ in self.open.values()}]
            while self.counts["asked"] < requests and len(self.open) < at_once and idle:
                self.ask(idle.pop(self.rng.randrange(len(idle))))
            self.bench.steps(self.rng.randrange(1, 6))
            if self.rng.random() < 0.05 and self.open:
                self.bench.engine.abort(self.rng.choice(sorted(self.open)))
            if self.rng.random() < 0.06:
                self.resize()
            self.settle()
            self.bench.scheduler.check()
        self.bench.run()
        self.counts |= self.bench.scheduler.reuse.snapshot()
        self.counts["preemptions"] = self.bench.scheduler.num_preemptions
        self.bench.check_empty()


@pytest.mark.parametrize("job_bytes", [0, 1])
@pytest.mark.parametrize(
    "requests", [300, pytest.param(10000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_a_crowd_of_sessions_gets_the_cold_answers(requests, job_bytes):
    device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=3)
    sizes = {"pages": 110, "slots": 150, "units": 4, "cold": (1 << 16) * job_bytes}
    crowd = Crowd(1, 64, device=device, job_bytes=job_bytes, run_ahead=bool(job_bytes), **sizes)
    crowd.run(requests, 64)
    print(crowd.counts, crowd.resizes)
    counts = crowd.counts
    assert counts["aborted"] > requests // 50 and counts["reusing"] >= 0.7 * requests, counts
    assert counts["hits_after_preemption"] >= requests // 50, counts
    assert counts["restores_from_host"] >= requests // 10, counts
    assert counts["across_a_resize"] >= requests // 50 and crowd.resizes >= 3, counts
    assert not job_bytes or counts["revived"] > requests // 100, counts
