"""On the simulated GPU: where experts lie, move and wait changes speed, never a token (class 1)."""

import random
from functools import cache

import pytest

from freetoken.core.errors import BusyError, CapacityError
from freetoken.core.units import MIB
from freetoken.experts.slots import MIN_SLOTS

from .served import Served, Trace, alone, serve, text_ids

SIM = dict(
    device="sim", machine="4060-laptop", gpu_memory=96 * MIB, max_model_len=2048, max_prefill_length=64
)
PROMPT = 150


def sim(**wishes) -> Served:
    return serve(**{**SIM, **wishes})


@cache
def oracle(exact: bool = False) -> Trace:
    """All experts resident on the same device: nothing ever moves."""
    return alone(1, PROMPT, 16, **SIM, moe_backend="fused", exact=exact)


SLOTS = [MIN_SLOTS, MIN_SLOTS + 1, 28, 94, 256]
SIZES = [(b, n) for b in ("offload", "hybrid") for n in SLOTS] + [("cpu", n) for n in (SLOTS[0], SLOTS[-1])]
"""The host computes everything on `cpu`, whatever the slots hold."""


@pytest.mark.parametrize(("backend", "slots"), SIZES)
def test_the_number_of_slots_changes_no_bit(backend, slots):
    assert alone(1, PROMPT, 16, **SIM, moe_backend=backend, moe_cache_size=slots) == oracle()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", ["offload", "hybrid"])
def test_the_order_of_completion_changes_no_bit(backend, seed):
    assert alone(1, PROMPT, 16, **SIM, moe_backend=backend, moe_cache_size=40, sim_seed=seed) == oracle()


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
def test_slow_links_and_hosts_change_no_bit(backend):
    for link, host in ((1.0, 50.0), (50.0, 2.0)):
        rates = {"sim_link_bw": link, "sim_host_bw": host}
        assert alone(1, PROMPT, 16, **SIM, moe_backend=backend, moe_cache_size=40, **rates) == oracle()


@cache
def on_the_cpu(seed: int, n: int, tokens: int) -> Trace:
    """In exact mode, in one chunk."""
    return alone(seed, n, tokens, device="cpu", moe_backend="fused", exact=True, max_prefill_length=512)


@pytest.mark.parametrize("slots", [None, 40])
def test_exact_mode_equals_the_cpu_device_whatever_the_backend(slots):
    there = on_the_cpu(1, PROMPT, 16)
    for backend in ("fused", "cpu", "offload", "hybrid"):
        assert alone(1, PROMPT, 16, **SIM, moe_backend=backend, moe_cache_size=slots, exact=True) == there


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", ["offload", "hybrid"])
def test_layer_major_prefill_equals_chunk_by_chunk_in_exact_mode(backend, overlap):
    there = on_the_cpu(2, 300, 4)
    served = sim(moe_backend=backend, moe_cache_size=40, exact=True, disable_moe_prefill_overlap=not overlap)
    served.submit("a", text_ids(served.built, 2, 300), 4)
    served.run()
    assert served.engine.stats.jobs == 1 and served.trace("a") == there
    served.close()


def test_a_job_moves_the_pool_over_the_link_at_most_once():
    served = sim(moe_backend="offload", moe_cache_size=40)
    served.submit("a", text_ids(served.built, 2, 600), 1)
    served.run()
    pool = 256 * served.built.engine.runner.experts.bank.slot_bytes
    moved = served.engine.runner.experts.stats.prefill_link_bytes
    assert served.engine.stats.jobs == 1 and 0.8 * pool < moved <= pool
    served.close()


@pytest.mark.parametrize(
    ("gap_ms", "tokens", "chunk"),
    [
        (0.2, 1500, 64),
        (None, 4000, 512),
        pytest.param(0.4, 1500, 64, marks=pytest.mark.soak),
        pytest.param(None, 4000, 256, marks=pytest.mark.soak),
    ],
)
def test_a_long_prefill_delays_a_running_stream_by_two_sub_chunks_at_most(gap_ms, tokens, chunk):
    """On the virtual clock, beside the step itself. The default gap is longer than the whole prefill here."""
    served = sim(
        moe_backend="offload",
        moe_cache_size=94,
        prefill_gap_ms=gap_ms,
        max_prefill_length=chunk,
        max_model_len=4096,
        num_tokens=8192,
    )
    now = served.built.device.clock.now
    served.submit("stream", text_ids(served.built, 1, 20), 2000)
    served.step(30)
    calm: list[float] = []
    at, seen = now(), len(served.trace("stream"))
    for _ in range(20):
        served.step()
        if len(served.trace("stream")) > seen:
            calm.append(now() - at)
            at, seen = now(), len(served.trace("stream"))
    served.submit("long", text_ids(served.built, 3, tokens), 1)
    gaps: list[float] = []
    while not served.trace("long"):
        served.step()
        if len(served.trace("stream")) > seen:
            gaps.append(now() - at)
            at, seen = now(), len(served.trace("stream"))
    job_s = sum(gaps)
    sub_chunk_s = job_s / (tokens / chunk)
    assert len(gaps) >= 4 and not served.engine.idle, "the stream goes on"
    assert max(gaps) <= max(calm) + 2 * sub_chunk_s
    served.close()


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_resizing_at_random_steps_changes_no_bit(backend, seed):
    served = sim(moe_backend=backend)
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    rng, resized = random.Random(seed), []

    def maybe_resize(step: int) -> None:
        if rng.random() < 0.3:
            resized.append(served.engine.resize(rng.randrange(52, 97) * MIB))

    served.run(maybe_resize)
    served.close()
    assert served.trace("a") == oracle()
    assert resized and all(f.done() and f.exception() is None for f in resized[:-1])
    assert served.engine.stats.resizes >= 1


def test_every_resize_that_waits_for_the_same_step_gets_its_own_outcome():
    served = sim(moe_backend="offload")
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.step(3)
    asked = [served.engine.resize(mib * MIB) for mib in (60, 20, 90)]
    served.run()
    assert [type(f.exception(0)) for f in asked] == [type(None), CapacityError, type(None)]
    assert served.engine.memory.budget_bytes == 90 * MIB and served.trace("a") == oracle()
    served.close()


def test_closing_tells_whoever_still_waits_for_a_resize():
    built = sim(moe_backend="offload").built
    built.engine.start(lambda outputs: None)
    asked = [built.engine.resize(mib * MIB) for mib in [60, 90] * 20]
    built.close()
    assert {type(f.exception(1)) for f in asked} <= {type(None), BusyError}


def test_a_resize_that_breaks_tells_who_asked_and_serving_goes_on():
    served = sim(moe_backend="offload")
    asked = served.engine.resize("much")  # no check before the engine's thread knows this fault
    served.step()
    assert isinstance(asked.exception(0), TypeError)
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.run()
    assert served.trace("a") == oracle()
    served.close()


def test_a_budget_that_cannot_hold_what_runs_is_refused_and_serving_goes_on():
    served = sim(moe_backend="offload")
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.step(3)
    refused = served.engine.resize(20 * MIB)
    served.run()
    assert isinstance(refused.exception(), CapacityError) and "wanted" in str(refused.exception())
    assert served.trace("a") == oracle()
    served.close()


@pytest.mark.parametrize("failing", range(1, 6))
def test_an_allocation_that_fails_in_a_resize_leaves_the_engine_serving(failing):
    served = sim(moe_backend="offload")
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.step(4)
    served.built.device.faults.fail_alloc = failing
    memory, pages = served.engine.memory, served.engine.scheduler.pages
    for mib in (60, 90):
        before = memory.num_slots, pages.num_units, memory.budget_bytes
        outcome = served.engine.resize(mib * MIB)
        served.step(2)
        if outcome.exception() is not None:
            assert (memory.num_slots, pages.num_units, memory.budget_bytes) == before, "old sizes back"
    served.built.device.faults.fail_alloc = 0
    served.run()
    assert served.trace("a") == oracle()
    served.close()


def test_slots_give_way_to_what_no_plan_knew_and_once_is_enough():
    """Kernels' code, graphs, gaps between tensors: the driver sees more than pools and weights."""
    served = sim(moe_backend="offload")
    device, memory = served.built.device, served.engine.memory
    record, before = served.built.plan.memory.slot_bytes, (memory.num_slots, memory.budget_bytes)
    gap = device.memory_bytes - sum(device.ledger.mapped.values())
    device.faults.unplanned_bytes = gap + 3 * record - 1
    assert device.over_bytes() == 3 * record - 1
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.submit("b", text_ids(served.built, 2, PROMPT), 16)
    served.run()
    assert served.engine.stats.jobs and device.over_bytes() == 0
    assert (memory.num_slots, memory.budget_bytes) == (before[0] - 3, before[1] - 3 * record)
    told = served.built.snapshot()["memory"]
    assert told["planned_bytes"] == before[1] and told["taken_bytes"] <= device.memory_bytes
    assert served.trace("a") == oracle()
    served.close()


def test_where_nothing_can_give_way_serving_goes_on(caplog):
    served = sim(moe_backend="fused")
    served.built.device.faults.unplanned_bytes = served.built.device.memory_bytes
    assert served.engine.memory.hold(served.engine.scheduler) == 0
    assert "no expert slots can give way" in caplog.text
    served.submit("a", text_ids(served.built, 1, PROMPT), 16)
    served.run()
    assert served.trace("a") == oracle()
    served.close()


def test_kv_grows_out_of_expert_slots_when_a_prompt_needs_it():
    served = sim(
        moe_backend="offload",
        max_model_len=8192,
        kv_reserve_tokens=256,
        moe_cache_size=None,
        gpu_memory=70 * MIB,
        max_running_requests=32,
    )
    before = served.engine.memory.num_slots
    pages = served.engine.plan.memory.num_pages
    ids = text_ids(served.built, 1, (pages + 40) * 16)
    served.submit("long", ids, 2)
    served.run()
    assert len(served.trace("long")) == 2
    assert served.engine.memory.num_slots < before and served.engine.scheduler.pages.num_units > pages
    served.close()


def test_counters_sum_up():
    for backend in ("offload", "cpu", "hybrid"):
        served = sim(moe_backend=backend, moe_cache_size=94)
        served.submit("a", text_ids(served.built, 1, PROMPT), 16)
        served.run()
        s = served.engine.runner.experts.stats
        assert s.hits + s.misses == s.requests > 0
        assert s.filled_tiles + s.cpu_tiles == s.missing_tiles > 0
        served.close()


def test_the_books_are_empty_after_company_leaves():
    served = sim(moe_backend="hybrid", moe_cache_size=60, max_running_requests=3)
    for seed in range(6):
        served.submit(f"r{seed}", text_ids(served.built, seed, 20 + 30 * seed), 6)
        served.step()
    served.engine.abort("r5")
    served.run()
    s = served.engine.scheduler
    s.reuse.clear()
    s.check()
    assert s.holds_nothing
    served.close()
