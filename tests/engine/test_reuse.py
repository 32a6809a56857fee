"""A prefix hit gives the tokens of a cold run, whatever was edited, stopped, resized or shared."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.machine import preset
from freetoken.core.request import FinishReason
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice

from .toy import PAGE, Bench, expected


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 97) for _ in range(n)]


def ask(bench: Bench, name: str, ids, **more) -> int:
    """Run one request alone, check its tokens, return how many prompt tokens were reused."""
    bench.submit(name, ids, **more)
    bench.run()
    assert bench.tokens(name) == expected(ids, 12)
    return bench.outputs[name][-1].cached_tokens


@pytest.mark.parametrize("n", [k * PAGE + d for k in (2, 4, 8) for d in (-1, 0, 1)])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_same_prompt_again_resumes_at_its_last_anchor(n, run_ahead):
    bench = Bench(slots=8, run_ahead=run_ahead)
    ids = prompt(n, n)
    assert ask(bench, "a", ids, anchors=[n - 2]) == 0
    assert ask(bench, "b", ids, anchors=[n - 2]) == (n - 2 if n - 2 >= 4 else 0)
    bench.check_empty()


@pytest.mark.parametrize("n", [9, 16, 17, 30])
def test_the_same_prompt_without_anchors_resumes_at_its_last_page(n):
    bench = Bench(slots=8)
    ask(bench, "a", prompt(1, n))
    assert ask(bench, "b", prompt(1, n)) == (n - 1) // PAGE * PAGE
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("n", [11, 12, 13, 30])
def test_a_conversation_that_goes_on_resumes_behind_its_answer(n, run_ahead):
    """The state that the answer ended with is kept: only the last token, or none, is computed again."""
    bench = Bench(slots=8, run_ahead=run_ahead)
    ids = prompt(n, n)
    ask(bench, "a", ids)
    longer = [*ids, *bench.tokens("a"), *prompt(n + 1, 9)]
    cached = ask(bench, "b", longer)
    assert len(ids) + len(bench.tokens("a")) - 1 <= cached <= len(ids) + len(bench.tokens("a"))
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("at", range(1, 10))
def test_an_answer_cut_behind_a_generated_anchor_resumes_there(at, run_ahead):
    """The token `at` of the answer is an anchor; what came behind it is replaced."""
    ids = prompt(3, 14)
    answer = expected(ids, 12)
    bench = Bench(slots=8, run_ahead=run_ahead)
    ask(bench, "a", ids, anchor_ids=[answer[at]])
    first = answer.index(answer[at])
    edited = [*ids, *answer[: first + 1], *prompt(9, 8)]
    assert ask(bench, "b", edited) == len(ids) + first + 1
    bench.check_empty()


def test_an_edit_in_the_middle_resumes_at_the_anchor_before_it():
    bench = Bench(slots=20, units=8, max_prefill_length=64)
    ids, anchors = prompt(5, 40), [6, 13, 21, 30]
    ask(bench, "a", ids, anchors=anchors)
    for edit, want in ((35, 30), (29, 21), (21, 21), (20, 13), (14, 13), (8, 6), (2, 0)):
        edited = [*ids[:edit], 96, *prompt(edit, 5)]
        assert ask(bench, f"e{edit}", edited) == want
    bench.check_empty()


def test_where_two_prompts_part_a_state_is_kept_for_the_third():
    bench = Bench(slots=8, max_prefill_length=64)
    base = prompt(5, 22)
    assert ask(bench, "a", [*base, *prompt(1, 9)]) == 0
    assert ask(bench, "b", [*base, *prompt(2, 9)]) == 0, "nobody knew that they would part here"
    assert ask(bench, "c", [*base, *prompt(3, 9)]) == 22
    bench.check_empty()


def test_requests_that_come_together_share_one_prefill():
    bench = Bench(slots=8, pages=200)
    base = prompt(5, 80)
    for i in range(4):
        bench.submit(f"r{i}", [*base, *prompt(i, 3)], anchors=[80])
    bench.run()
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected([*base, *prompt(i, 3)], 12)
    assert [bench.outputs[f"r{i}"][-1].cached_tokens for i in range(4)] == [0, 80, 80, 80]
    bench.check_empty()


def test_four_choices_of_one_prompt_compute_it_once():
    bench = Bench(slots=8, pages=200)
    ids = prompt(5, 70)
    for i in range(4):
        bench.submit(f"r{i}", ids, anchors=[66])
    bench.run()
    assert bench.model.num_tokens < 70 + 3 * 4 + 4 * 12
    bench.check_empty()


def test_a_leader_that_leaves_lets_the_others_go():
    bench = Bench(slots=8, pages=200)
    base = prompt(5, 80)
    for i in range(3):
        bench.submit(f"r{i}", [*base, *prompt(i, 3)], anchors=[80])
    bench.steps(3)
    bench.engine.abort("r0")
    bench.run()
    for i in (1, 2):
        assert bench.tokens(f"r{i}") == expected([*base, *prompt(i, 3)], 12)
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_preempted_requests_come_back_through_the_tree(run_ahead):
    bench = Bench(pages=13, slots=8, run_ahead=run_ahead)
    for i in range(4):
        bench.submit(f"r{i}", prompt(i, 6), max_tokens=14, ignore_eos=True)
    bench.run()
    assert bench.engine.stats.preemptions > 0
    for i in range(4):
        assert bench.tokens(f"r{i}") == expected(prompt(i, 6), 14, eos=False)
    assert bench.model.num_tokens < 4 * 20 + 30, "most of what was computed was not computed again"
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_preempted_request_finds_what_it_had_generated(run_ahead):
    """Its newest pages go to the older request; behind the last anchor that is left it goes on."""
    bench = Bench(pages=13, slots=20, run_ahead=run_ahead)
    for i in range(2):
        bench.submit(f"r{i}", prompt(i, 8), (), range(97), max_tokens=24, ignore_eos=True)
    bench.run()
    assert bench.engine.stats.preemptions == 1
    assert bench.scheduler.reuse.cached_tokens > 12, "more than its prompt"
    for i in range(2):
        assert bench.tokens(f"r{i}") == expected(prompt(i, 8), 24, eos=False)
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("n", [11, 12, 13])
def test_a_prompt_that_is_known_to_its_end_computes_its_last_token(n, run_ahead):
    bench = Bench(slots=8, run_ahead=run_ahead)
    ids = prompt(n, n)
    ask(bench, "a", ids)
    whole = [*ids, *bench.tokens("a")]
    assert ask(bench, "b", whole) == len(whole) - 1
    bench.check_empty()


def test_a_job_that_is_dropped_leaves_no_half_written_state():
    bench = Bench(slots=8, job_bytes=1, prefill_gap_ms=0)
    ids = prompt(1, 70)
    bench.submit("other", [3], max_tokens=60, ignore_eos=True)
    bench.steps(2)
    bench.submit("a", ids, anchors=[20, 40, 60])
    while not bench.engine._job or bench.engine.scheduler.find("a").num_computed == 0:
        bench.steps()
    bench.steps()
    bench.engine.abort("a")
    bench.run()
    ask(bench, "b", ids, anchors=[20, 40, 60])
    bench.check_empty()


def test_what_a_failed_request_computed_is_forgotten():
    bench = Bench(slots=8)
    bench.model.nan_row_of = 50
    ids = [50, *prompt(1, 40)]
    bench.submit("bad", ids)
    bench.run()
    assert bench.finish("bad") is FinishReason.ERROR
    bench.model.nan_row_of = -1
    assert ask(bench, "good", ids) == 0
    bench.check_empty()


@pytest.mark.parametrize("leader_ends", ["fails first", "is aborted"])
def test_what_a_failing_prompt_had_from_another_is_not_offered_again(leader_ends):
    """The follower resumes behind what the leader handed over on the way, before any answer stood on it."""
    bench = Bench(slots=20, pages=200)
    base = [50, *prompt(1, 60)]
    bench.model.nan_row_of = 50
    bench.submit("leader", [*base, *prompt(2, 60)], anchors=[20, 40, 60])
    bench.steps(9)
    bench.submit("follower", [*base[:58], *prompt(3, 90)], anchors=[20, 40])
    bench.steps(3)
    assert bench.engine.scheduler.find("follower").num_cached == 40
    if leader_ends == "is aborted":
        bench.engine.abort("leader")
    bench.run()
    assert bench.finish("follower") is FinishReason.ERROR
    bench.model.nan_row_of = -1
    assert ask(bench, "again", base) == 0, "the doubtful beginning is gone"
    assert ask(bench, "third", [*base, 5]) > 0, "a finite answer has proved it"
    bench.check_empty()


def test_a_failure_costs_only_what_no_answer_stands_on():
    bench = Bench(slots=20, pages=200)
    base = [50, *prompt(1, 40)]
    ask(bench, "good", base, anchors=[20, 40])
    bench.model.nan_row_of = 50
    bench.submit("bad", [*base, *prompt(2, 20)])
    bench.run()
    assert bench.finish("bad") is FinishReason.ERROR
    bench.model.nan_row_of = -1
    assert ask(bench, "again", [*base, *prompt(3, 20)]) >= 40
    bench.check_empty()


def test_a_broken_step_does_not_spoil_what_was_cached_before():
    bench = Bench(slots=8)
    ids = prompt(1, 30)
    ask(bench, "a", ids)
    bench.submit("b", ids)
    bench.steps(1)
    bench.model.fail_at = bench.model.forwards + 1
    bench.run()
    assert bench.finish("b") is FinishReason.ERROR
    assert ask(bench, "c", ids) == 28
    bench.check_empty()


def test_a_request_that_has_to_wait_anyway_does_not_empty_the_cache():
    bench = Bench(slots=8, pages=60)
    ask(bench, "a", prompt(1, 40))
    bench.submit("running", prompt(4, 60), max_tokens=30, ignore_eos=True)
    bench.steps(3)
    pages = bench.cache.num_pages
    bench.submit("waits", prompt(5, 200))
    bench.steps(2)
    assert bench.cache.num_pages >= pages >= 12
    bench.run()
    assert bench.tokens("waits") == expected(prompt(5, 200), 12)
    bench.check_empty()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("wait", range(8, 30, 3))
def test_a_second_request_hits_while_the_first_still_speaks(wait, run_ahead):
    """The donor goes on writing its state and its last page; the copies are nobody else's."""
    bench = Bench(slots=8, run_ahead=run_ahead)
    ids = prompt(wait, 19)
    bench.submit("donor", ids, anchors=[9, 17], max_tokens=60, ignore_eos=True)
    bench.steps(wait)
    for i in range(3):
        bench.submit(f"r{i}", [*ids, *bench.tokens("donor")[:i]])
    bench.run()
    assert bench.tokens("donor") == expected(ids, 60, eos=False)
    for i in range(3):
        assert bench.tokens(f"r{i}") == expected([*ids, *expected(ids, 60, eos=False)[:i]], 12)
        assert bench.outputs[f"r{i}"][-1].cached_tokens >= 17
    bench.check_empty()


def test_a_title_generator_cannot_drain_a_session():
    bench = Bench(slots=6, units=2, max_prefill_length=64, pages=400)
    session = prompt(1, 60)
    ask(bench, "s", session, anchors=[20, 40, 56], group="session")
    for i in range(30):
        ask(bench, f"t{i}", prompt(100 + i, 20), anchors=[10, 16], group="titles")
    assert ask(bench, "again", [*session[:50], *prompt(7, 6)], group="session") == 40
    bench.check_empty()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("units", [1, 3])
def test_checkpoints_survive_in_host_memory_when_the_device_has_room_for_few(seed, units):
    device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=seed)
    bench = Bench(slots=60, units=units, pages=400, device=device)
    prompts = [prompt(i, 24) for i in range(20)]
    for i, ids in enumerate(prompts):
        ask(bench, f"a{i}", ids, anchors=[20])
    for i, ids in enumerate(prompts):
        assert ask(bench, f"b{i}", ids, anchors=[20]) == 20
    assert bench.scheduler.reuse.snapshot()["restores_from_host"] >= 16
    bench.check_empty()


@pytest.mark.parametrize(("units", "delay_s"), [(1, 2e-4), (3, 8e-4)])
def test_a_slow_link_costs_checkpoints_and_never_a_token(units, delay_s):
    device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=1)
    device.faults.delay_copy_s = delay_s
    bench = Bench(slots=60, units=units, pages=400, device=device)
    for i in range(40):
        ask(bench, f"a{i}", prompt(i % 10, 24), anchors=[20])
    counts = bench.scheduler.reuse.snapshot()
    assert counts["checkpoints_missed"] > 0 and counts["restores_from_host"] > 0
    bench.check_empty()


def devices():
    yield lambda seed: CpuDevice(memory_bytes=1 << 30)
    yield lambda seed: SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=seed)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_conversations_give_each_request_its_answer_alone(data):
    """Edits, aborts, preemption, jobs, few or many checkpoints: every answer is the cold one's."""
    make = data.draw(st.sampled_from(list(devices())))
    bench = Bench(
        pages=data.draw(st.sampled_from([14, 30, 90])),
        device=make(data.draw(st.integers(1, 5))),
        job_bytes=data.draw(st.sampled_from([0, 1])),
        slots=data.draw(st.sampled_from([0, 1, 4, 20])),
        units=data.draw(st.sampled_from([0, 1, 4])),
        run_ahead=data.draw(st.booleans()),
        prefill_gap_ms=data.draw(st.sampled_from([0, 1000])),
    )
    histories = [prompt(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 30)))]
    live: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for i in range(data.draw(st.integers(2, 14))):
        base = data.draw(st.sampled_from(histories))
        cut = data.draw(st.integers(0, len(base)))
        ids = [*base[:cut], *prompt(i, data.draw(st.integers(0, 6))), *base[cut : cut + 6]][:40] or [1]
        name = f"r{i}"
        live[name] = ids
        anchors = data.draw(st.sets(st.integers(1, 40), max_size=6))
        anchor_ids = data.draw(st.sets(st.integers(1, 96), max_size=12))
        bench.submit(name, ids, anchors, anchor_ids, group=data.draw(st.sampled_from("ab")))
        bench.steps(data.draw(st.integers(0, 25)))
        bench.scheduler.check()
        bench.cache.check()
        if data.draw(st.integers(0, 4)) == 0:
            victim = data.draw(st.sampled_from(sorted(live)))
            bench.engine.abort(victim)
            aborted.add(victim)
        done = [n for n in live if bench.tokens(n) and bench.finish(n) is not None]
        histories += [[*live[n], *bench.tokens(n)] for n in done[-1:]]
        histories.append(ids)
    bench.run()
    bench.check_answers(live, aborted, 12)
    bench.check_empty()


def test_a_follower_starts_as_soon_as_the_shared_part_is_computed():
    bench = Bench(slots=8, pages=300)
    base = prompt(5, 48)
    leader, follower = [*base, *prompt(6, 200)], [*base, *prompt(7, 6)]
    bench.submit("leader", leader, anchors=[48])
    bench.submit("follower", follower, anchors=[48])
    for _ in range(300):
        bench.steps()
        if bench.tokens("follower"):
            break
    assert not bench.tokens("leader"), "the leader's long tail kept its follower waiting"
    assert bench.outputs["follower"][0].cached_tokens == 48
    bench.run()
    assert bench.tokens("leader") == expected(leader, 12) and bench.tokens("follower") == expected(
        follower, 12
    )
    bench.check_empty()


def test_a_prompt_that_is_left_half_way_is_not_computed_again():
    bench = Bench(slots=8, pages=300)
    ids = prompt(5, 200)
    bench.submit("left", ids, anchors=[40, 80, 120])
    bench.steps(14)
    bench.engine.abort("left")
    bench.run()
    bench.submit("again", ids, anchors=[40, 80, 120])
    bench.run()
    assert bench.tokens("again") == expected(ids, 12)
    assert bench.outputs["again"][-1].cached_tokens >= 80
    bench.check_empty()
