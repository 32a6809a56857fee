"""On the demo model, recurrent and full attention: a prefix hit is the cold run, bit by bit in exact mode."""

import random
from functools import cache

import numpy as np
import pytest

from freetoken.bench._bound import common
from freetoken.core.units import MIB

from . import sessions
from .served import Served, Trace, say, serve, teacher_forced, text_ids

EXACT = dict(exact=True, device="cpu", moe_backend="fused", max_model_len=4096, num_tokens=16384)


@cache
def oracle_engine() -> Served:
    return serve(**EXACT, prefix_cache=False)


@cache
def cold(ids: tuple[int, ...], tokens: int) -> Trace:
    """The same request with every cache off."""
    served = oracle_engine()
    served.outputs.clear()
    served.submit("cold", np.array(ids, np.int32), tokens)
    served.run()
    return served.trace("cold")


@pytest.mark.parametrize("n", [k * 16 + d for k in (2, 4) for d in (-1, 0, 1)])
def test_a_hit_is_bit_equal_at_every_edge_of_a_page(n):
    served = serve(**EXACT)
    ids = text_ids(served.built, n, n)
    for name in ("first", "again"):
        served.submit(name, ids, 6)
        served.run()
        assert served.trace(name) == cold(tuple(int(i) for i in ids), 6)
    assert served.outputs["again"][-1].cached_tokens == (n - 1) // 16 * 16
    served.close()


def session(seed: int, turns: int, **wishes) -> tuple[int, int]:
    """A session of edited turns, each answer compared with the cold one; (computed, least) prompt tokens."""
    rng, served = random.Random(seed), serve(**{**EXACT, **wishes})
    history, known, computed, least = sessions.opening(rng, 30), [], 0, 0
    for turn in range(turns):
        name = f"t{turn}"
        ids = say(served, name, history, tokens=6)
        served.run()
        assert served.trace(name) == cold(ids, 6), f"turn {turn}"
        ids = np.array(ids)
        shared = max((min(common(ids, other), len(ids) - 1) for other in known), default=0)
        computed += len(ids) - served.outputs[name][-1].cached_tokens
        least += len(ids) - shared
        known.append(np.concatenate([ids, [t for t, _ in served.trace(name)]]))
        history = sessions.edited((*history, *sessions.step(rng, turn, 12)), rng)
        served.engine.scheduler.check()
        served.engine.scheduler.reuse.cache.check()
    served.close()
    return computed, least


@pytest.mark.parametrize("seed", [0, 1])
def test_edited_sessions_are_bit_equal_and_compute_little_more_than_they_must(seed):
    computed, least = session(seed, 5, run_ahead=bool(seed))
    assert computed <= least + 5 * 8


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10, 16))
def test_longer_edited_sessions_are_bit_equal(seed):
    session(seed, 16, run_ahead=bool(seed % 2), checkpoint_memory=(seed % 3) * 8 * MIB)


SIM = dict(
    EXACT, device="sim", machine="4060-laptop", gpu_memory=110 * MIB, max_prefill_length=64,
    max_model_len=2048, num_tokens=None, kv_reserve_tokens=1024,
)  # fmt: skip


@pytest.mark.parametrize(("backend", "seed"), [("offload", 3), ("hybrid", 4)])
def test_on_a_device_behind_a_link_resumed_states_come_back_whole(backend, seed):
    """Prefixes in pages, states through host memory, the budget changed meanwhile: every bit as cold."""
    rng, served = random.Random(seed), serve(**{**SIM, "moe_backend": backend, "sim_seed": seed})
    histories = [sessions.opening(rng, 16 + 4 * i) for i in range(3)]
    asked = {}
    for turn in range(3):
        for i, history in enumerate(histories):
            asked[f"s{i}t{turn}"] = say(served, f"s{i}t{turn}", history, 4, group=str(i))
        resized = served.engine.resize(rng.randrange(80, 110) * MIB)
        served.run()
        assert resized.exception() is None
        served.engine.scheduler.check()
        histories = [sessions.edited((*history, *sessions.step(rng, turn, 8)), rng) for history in histories]
    for name, ids in asked.items():
        assert served.trace(name) == cold(ids, 4), name
    counts = served.engine.scheduler.reuse.snapshot()
    assert counts["hits"] >= 4 and counts["restores"] == counts["hits"]
    served.close()


def test_a_smaller_budget_takes_from_the_cache_and_never_fails_because_of_it():
    served = serve(**{**SIM, "exact": False, "moe_backend": "offload", "kv_reserve_tokens": 4096})
    for seed in range(8):
        served.submit(f"r{seed}", text_ids(served.built, seed, 400), 1)
    served.run()
    scheduler, before = served.engine.scheduler, served.engine.scheduler.pages.num_used
    assert before == scheduler.reuse.cache.num_pages > 150
    for mib in (70, 56, 110):
        resized = served.engine.resize(mib * MIB)
        served.step()
        assert resized.exception() is None
        scheduler.check()
        scheduler.reuse.cache.check()
    assert 0 < scheduler.reuse.cache.num_pages < before
    served.submit("again", text_ids(served.built, 7, 400), 4)
    served.run()
    assert served.outputs["again"][-1].cached_tokens >= 384
    served.close()


def test_kv_grows_out_of_the_coldest_slots_before_prefixes_go_and_only_so_far():
    served = serve(**{**SIM, "exact": False, "moe_backend": "offload", "gpu_memory": 80 * MIB})
    memory, planned = served.engine.memory, served.engine.plan.memory
    for seed in range(6):
        served.submit(f"r{seed}", text_ids(served.built, seed, 400), 1)
        served.run()
        if memory.num_slots == planned.num_slots:
            assert served.built.snapshot()["cache"]["evicted_pages"] == 0, "a prefix went before a slot"
        assert memory.num_slots >= planned.num_slots * 7 // 8, (
            "prefixes took more than an eighth of the slots"
        )
    assert memory.num_slots < planned.num_slots and memory._kv.num_units > planned.num_pages
    served.submit("again", text_ids(served.built, 5, 400), 1)
    served.run()
    assert served.outputs["again"][-1].cached_tokens >= 384
    served.engine.scheduler.check()
    served.close()


def test_a_hit_stays_within_the_rule_in_normal_mode():
    """Class 2: the same prompt resumed and cold, teacher-forced; the best token agrees unless it is close."""
    from freetoken.core.batch import Segment

    served = serve(device="cpu", moe_backend="fused", max_model_len=2048, num_tokens=4096)
    ids = text_ids(served.built, 4, 120)
    runner, pages = served.engine.runner, list(range(1, 9))
    want = teacher_forced(served.built, ids, [120])[0]
    runner.launch([Segment(ids[:90], 0, pages, 1, 1, saves=((57, 2), (90, 3)), anchors=(57,))])
    noise = (teacher_forced(served.built, ids, [57, 63])[-1] - want).abs().max()
    runner.launch([Segment(ids[:90], 0, pages, 1, 1, saves=((57, 2),), anchors=(57,))])
    got = runner.launch([Segment(ids[57:], 57, pages, 2, 1)]).logits[0]
    assert (got - want).abs().max() <= 4 * max(float(noise), 1e-3)
    top = want.topk(2).values
    assert got.argmax() == want.argmax() or float(top[0] - top[1]) < 8 * float(noise)
    served.close()
