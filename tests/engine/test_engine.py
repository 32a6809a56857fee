"""The engine gives every request its own answer, whatever else happens beside it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.request import FinishReason, ThinkBudget

from .toy import EOS, Bench, expected


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 97) for _ in range(n)]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_one_request_gets_its_tokens_at_every_prompt_length(n, run_ahead):
    bench = Bench(run_ahead=run_ahead)
    bench.submit("a", prompt(n, n))
    bench.run()
    assert bench.tokens("a") == expected(prompt(n, n), 12)
    bench.check_empty()


@pytest.mark.parametrize(("n", "jobs"), [(9, 1), (31, 1), (32, 1), (33, 1), (41, 2), (70, 2)])
def test_a_layer_major_job_gives_the_same_tokens(n, jobs):
    bench = Bench(job_bytes=1)
    bench.submit("a", prompt(n, n))
    bench.run()
    assert bench.tokens("a") == expected(prompt(n, n), 12)
    assert bench.engine.stats.jobs == jobs, "what is left below the threshold rides"
    bench.check_empty()


def test_a_stream_goes_on_while_a_job_runs():
    bench = Bench(job_bytes=1, prefill_gap_ms=0)
    bench.submit("short", [5], max_tokens=30, ignore_eos=True)
    bench.steps(2)
    before = len(bench.tokens("short"))
    bench.submit("long", prompt(1, 32))
    bench.steps(6)
    assert not bench.tokens("long") and len(bench.tokens("short")) >= before + 5
    bench.run()
    assert bench.tokens("short") == expected([5], 30, eos=False)
    assert bench.tokens("long") == expected(prompt(1, 32), 12)


def test_eos_ends_an_answer_one_step_behind_without_an_extra_token():
    seed = next(s for s in range(500) if 1 < len(expected(prompt(s, 5), 10)) < 10)
    bench = Bench()
    bench.submit("a", prompt(seed, 5))
    bench.run()
    assert bench.tokens("a") == expected(prompt(seed, 5), 12)
    assert bench.tokens("a")[-1] == EOS and bench.finish("a") is FinishReason.STOP


def test_more_requests_than_rows_all_end():
    bench = Bench(max_running_requests=3)
    for i in range(10):
        bench.submit(f"r{i}", prompt(i, 3 + i))
    bench.run()
    for i in range(10):
        assert bench.tokens(f"r{i}") == expected(prompt(i, 3 + i), 12)
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_preempted_requests_come_back_with_the_same_tokens(run_ahead):
    bench = Bench(pages=9, run_ahead=run_ahead)
    for i in range(4):
        bench.submit(f"r{i}", prompt(i, 6), max_tokens=14, ignore_eos=True)
    bench.run()
    assert bench.engine.stats.preemptions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected(prompt(i, 6), 14, eos=False)
    bench.check_empty()


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("job_bytes", [0, 1])
def test_an_abort_at_any_phase_frees_everything_and_disturbs_nobody(after, job_bytes):
    bench = Bench(job_bytes=job_bytes, prefill_gap_ms=0)
    bench.submit("keep", prompt(1, 6))
    bench.submit("drop", prompt(2, 40))
    bench.steps(after)
    bench.engine.abort("drop")
    bench.engine.abort("drop")
    bench.run()
    assert bench.finish("drop") is FinishReason.ABORT
    assert bench.tokens("keep") == expected(prompt(1, 6), 12)
    bench.engine.abort("drop")
    bench.engine.abort("never-existed")
    bench.run()
    bench.check_empty()


def test_one_member_of_a_job_can_leave_it():
    bench = Bench(job_bytes=1)
    bench.submit("a", prompt(1, 12))
    bench.submit("b", prompt(2, 12))
    bench.engine.read_inbox()
    bench.engine._start_job(bench.engine._schedule().job)
    bench.engine.abort("a")
    bench.run()
    assert bench.finish("a") is FinishReason.ABORT and not bench.tokens("a")
    assert bench.tokens("b") == expected(prompt(2, 12), 12)
    bench.check_empty()


def test_a_broken_step_fails_its_requests_and_the_next_ones_work():
    bench = Bench()
    bench.submit("a", [3, 4])
    bench.steps(2)
    bench.model.fail_at = bench.model.forwards + 1
    bench.run()
    assert bench.finish("a") is FinishReason.ERROR and bench.outputs["a"][-1].error.code == "device_failed"
    bench.submit("b", [5, 6])
    bench.run()
    assert bench.tokens("b") == expected([5, 6], 12)
    bench.check_empty()


def test_an_engine_that_fails_again_and_again_says_so():
    bench = Bench()
    for i in range(3):
        bench.model.fail_at = bench.model.forwards + 1
        bench.submit(f"r{i}", [3])
        bench.run()
    assert bench.engine.error.code == "engine_failed"
    bench.submit("late", [3])
    bench.run()
    assert bench.outputs["late"][-1].error.code == "engine_failed"


def test_logits_that_are_not_numbers_fail_their_request_alone():
    bench = Bench()
    bench.model.nan_row_of = 50
    bench.submit("bad", [50, 1])
    bench.submit("good", [51, 1])
    bench.run()
    assert bench.outputs["bad"][-1].error.code == "nan_logits"
    assert bench.tokens("good") == expected([51, 1], 12)
    bench.check_empty()


def test_an_overlong_prompt_is_refused_with_used_and_limit():
    bench = Bench(max_model_len=50)
    bench.submit("at", prompt(1, 50))
    bench.submit("below", prompt(1, 49), ignore_eos=True)
    bench.run()
    error = bench.outputs["at"][-1].error
    assert (error.code, error.used, error.limit) == ("context_length_exceeded", 50, 50)
    assert bench.tokens("below") == expected(prompt(1, 49), 1, eos=False)
    assert bench.finish("below") is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thinking_budget_forces_the_end_of_the_block(budget):
    bench = Bench()
    forced = (90, 91, 92)
    think = ThinkBudget(max_tokens=budget, close_id=999, forced_ids=forced)
    bench.submit("a", [7], think=think, max_tokens=10, ignore_eos=True)
    bench.run()
    tokens = bench.tokens("a")
    assert tokens[:budget] == expected([7], budget, eos=False)
    assert tuple(tokens[budget : budget + 3]) == forced
    assert tokens[budget + 3 :] == expected([7, *tokens[: budget + 3]], 7 - budget, eos=False)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_traffic_gives_each_request_its_answer_alone(data):
    """Arrivals, aborts and steps in any order: answers are as alone, and everything is given back."""
    bench = Bench(
        pages=data.draw(st.sampled_from([14, 30, 64])),
        job_bytes=data.draw(st.sampled_from([0, 1])),
        run_ahead=data.draw(st.booleans()),
        prefill_gap_ms=data.draw(st.sampled_from([0, 1000])),
    )
    live: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(1, 12))):
        name = f"r{i}"
        live[name] = prompt(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 34)))
        bench.submit(name, live[name])
        bench.steps(data.draw(st.integers(0, 6)))
        if data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(sorted(live)))
            bench.engine.abort(victim)
            aborted.add(victim)
    bench.run()
    bench.check_answers(live, aborted, 12)
    bench.check_empty()


@pytest.mark.parametrize("lengths", [[64, 64, 64, 64], [200, 8, 8, 8], [3, 150, 40, 90], [120, 1, 1, 1]])
def test_nobody_waits_more_than_twice_their_fair_share(lengths):
    """A fair share: as if each had an equal part of every chunk all along."""
    bench, first = Bench(pages=200), {}
    for i, n in enumerate(lengths):
        bench.submit(f"r{i}", prompt(i, n), max_tokens=1)
    for step in range(1, 400):
        bench.steps()
        for i in range(len(lengths)):
            if bench.outputs.get(f"r{i}"):
                first.setdefault(i, step)
    for i, n in enumerate(lengths):
        fair_steps = sum(min(n, other) for other in lengths) / 8
        assert first[i] <= 2 * fair_steps + 3, f"prompt of {n} waited {first[i]} steps, fair is {fair_steps}"


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench(pages=200)
    bench.submit("long", prompt(1, 400), max_tokens=1)
    bench.steps(3)
    bench.submit("short", prompt(2, 8), max_tokens=1)
    bench.steps(6)
    assert bench.tokens("short") and not bench.tokens("long")
