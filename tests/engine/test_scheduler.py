"""The scheduler keeps its promises: fair shares, progress, and every unit owned once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from freetoken.cache.null import NullCache
from freetoken.cache.pages import UnitAllocator
from freetoken.core.prefix import NoMover
from freetoken.core.request import FinishReason, Request, SamplingParams, Submit
from freetoken.engine.reuse import Reuse
from freetoken.engine.scheduler import Limits, NeedsSync, Scheduler, share


def request(name: str, prompt: int, arrival: int = 0, max_tokens: int = 100) -> Request:
    ids = np.arange(prompt, dtype=np.int32)
    return Request(Submit(name, ids, SamplingParams(max_tokens=max_tokens)), number=arrival)


def scheduler(
    pages: int = 17, running: int = 4, chunk: int = 8, jobs=lambda n: False, page: int = 4
) -> Scheduler:
    limits = Limits(running, chunk, 32, page, 1000)
    reuse = Reuse(
        NullCache(), UnitAllocator("pages", pages), UnitAllocator("states", running + 1), NoMover(), page
    )
    return Scheduler(limits, reuse, wants_job=jobs)


def settle(s: Scheduler, works) -> None:
    """Pretend that the step ran: everyone who got logits draws a token that is read at once."""
    for w in works:
        if w.wants_logits and w.request.finish is None:
            w.request.append(7)


@given(st.integers(0, 50), st.lists(st.integers(0, 30), max_size=8))
def test_shares_are_fair_and_spend_what_they_can(budget, wants):
    parts = share(budget, wants)
    assert sum(parts) == min(budget, sum(wants))
    assert all(0 <= part <= want for part, want in zip(parts, wants, strict=True))
    unmet = [part for part, want in zip(parts, wants, strict=True) if part < want]
    if unmet:
        assert max(parts) <= min(unmet) + 1, "nobody gets more while another is short by more than one"


def test_a_prompt_is_computed_in_chunks_and_only_the_last_wants_logits():
    s = scheduler()
    s.add(request("a", 20))
    flags = [
        (w.start, w.num_tokens, w.wants_logits)
        for _ in range(3)
        for w in s.schedule(in_flight=False, job_active=False).batch
    ]
    assert flags == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_two_long_prompts_share_the_chunk():
    s = scheduler(pages=60)
    s.add(request("a", 100, 0))
    s.add(request("b", 100, 1))
    works = s.schedule(in_flight=False, job_active=False).batch
    assert [w.num_tokens for w in works] == [4, 4]


def test_a_decode_row_rides_beside_a_prefill():
    s = scheduler(pages=60)
    s.add(request("a", 3, 0))
    settle(s, s.schedule(in_flight=False, job_active=False).batch)
    s.add(request("b", 30, 1))
    works = s.schedule(in_flight=False, job_active=False).batch
    assert [(w.request.id, w.num_tokens) for w in works] == [("a", 1), ("b", 8)]


def test_a_job_counts_its_tokens_only_when_it_is_committed():
    s = scheduler(pages=60, jobs=lambda n: n > 8)
    a = request("a", 20)
    s.add(a)
    assert [w.num_tokens for w in s.schedule(in_flight=False, job_active=False).job] == [20]
    assert a.num_computed == 0
    assert s.schedule(in_flight=False, job_active=True).batch == (), "a request in a job is not touched"
    s.job_ended(committed=True)
    assert a.num_computed == 20


def test_a_dropped_job_leaves_the_request_where_it_was():
    s = scheduler(pages=60, jobs=lambda n: n > 8)
    a = request("a", 20)
    s.add(a)
    s.schedule(in_flight=False, job_active=False)
    s.job_ended(committed=False)
    assert a.num_computed == 0
    assert [w.num_tokens for w in s.schedule(in_flight=False, job_active=False).job] == [20]


def test_the_newest_request_is_preempted_when_pages_run_out_and_comes_back():
    s = scheduler(pages=5, running=2)
    a, b = request("a", 7, 0), request("b", 7, 1)
    s.add(a)
    s.add(b)
    for _ in range(8):
        settle(s, s.schedule(in_flight=False, job_active=False).batch)
        s.check()
    assert b.preemptions == 1 and b in s.waiting
    assert a.num_output > b.num_output
    s.release(a, FinishReason.STOP)
    settle(s, s.schedule(in_flight=False, job_active=False).batch)
    assert b in s.running and b.num_computed > 0


def test_preemption_waits_until_the_step_in_flight_is_read():
    s = scheduler(pages=5, running=2)
    s.add(request("a", 8, 0))
    s.add(request("b", 7, 1))
    settle(s, s.schedule(in_flight=False, job_active=False).batch)
    settle(s, s.schedule(in_flight=False, job_active=False).batch)
    with pytest.raises(NeedsSync):
        for _ in range(8):
            settle(s, s.schedule(in_flight=True, job_active=False).batch)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_sum():
    s = scheduler(pages=5)
    s.add(request("a", 100))
    s.add(request("b", 4))
    works = s.schedule(in_flight=False, job_active=False).batch
    assert [r.id for r in s.refused] == ["a"] and s.refused[0].error.code == "kv_too_small"
    assert [w.request.id for w in works] == ["b"], "the one behind it goes on"


def test_release_is_idempotent_and_late_releases_do_nothing():
    s = scheduler()
    a = request("a", 5)
    s.add(a)
    s.schedule(in_flight=False, job_active=False)
    s.release(a, FinishReason.ABORT)
    s.release(a, FinishReason.STOP)
    assert a.finish is FinishReason.ABORT
    assert s.pages.num_used == s.rows.num_used == s.states.num_used == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, ends and job ends keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.s = scheduler(pages=12, running=3, jobs=lambda n: n > 10)
        self.count = 0
        self.job = False

    @rule(prompt=st.integers(1, 40))
    def arrive(self, prompt):
        self.count += 1
        self.s.add(request(f"r{self.count}", prompt, self.count, max_tokens=9))

    @rule()
    def step(self):
        schedule = self.s.schedule(in_flight=False, job_active=self.job)
        self.s.refused.clear()
        self.job = self.job or bool(schedule.job)
        settle(self.s, schedule.batch)
        for r in list(self.s.running):
            if r.num_output >= 9:
                self.s.release(r, FinishReason.LENGTH)

    @rule(committed=st.booleans())
    def end_job(self, committed):
        works = self.s._job
        self.s.job_ended(committed=committed)
        if committed:
            settle(self.s, works)
        self.job = False

    @rule(data=st.data())
    def abort(self, data):
        free = [r for r in (*self.s.running, *self.s.waiting) if r.id not in self.s.in_job]
        if free:
            self.s.release(data.draw(st.sampled_from(free)), FinishReason.ABORT)

    @invariant()
    def books_are_straight(self):
        self.s.check()
        for r in self.s.running:
            assert len(r.page_ids) * 4 >= r.num_computed


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
