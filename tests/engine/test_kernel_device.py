"""The whole engine on a device whose kernels decide residency, by the reference makers on a CPU.

Where experts lie, what streams, what is prefetched and what a resize takes away must not change a bit while
the device computes everything; with the host's help answers stay within its rounding.
"""

from __future__ import annotations

import random
import time

import pytest

from freetoken.core.options import Options
from freetoken.core.units import MIB
from freetoken.engine.build import Built, build
from freetoken.kernels.expert_step import Table
from freetoken.native.library import library
from tests.experts.device_build import KernelCpu

from .served import Served, Trace, text_ids

needs_native = pytest.mark.skipif(library() is None, reason="the native library is not built")
PROMPTS, TOKENS, MEMORY = (150, 7, 40), 10, 96 * MIB


DEVICES = ["kernel_cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def opened(on: str, **wishes) -> Built:
    wishes = {"max_prefill_length": 64, "prefill_gap_ms": 0.0, **wishes}
    if on == "cuda":
        return build(Options(device="cuda", **wishes))
    return build(Options(**wishes), device=KernelCpu(MEMORY))


def serve(on: str, between=lambda built, step: None, **wishes) -> tuple[dict[str, Trace], Built]:
    """Traces of a long, a short and a middling prompt that run together."""
    served = Served(opened(on, **wishes))
    for name, size in enumerate(PROMPTS):
        served.submit(str(name), text_ids(served.built, name, size), TOKENS)
        served.step(2)
    step = 0
    while not served.engine.idle:
        between(served.built, step)
        served.step()
        step += 1
    traces = {name: served.trace(name) for name in map(str, range(len(PROMPTS)))}
    stats = served.engine.runner.experts.stats
    assert stats.hits + stats.misses == stats.requests > 0
    check_owners(served.engine.runner.experts.table.table)
    served.built.close()
    return traces, served.built


def check_owners(table: Table) -> None:
    """Each slot has the owner that says so, and each expert with a slot owns it."""
    slot_of, expert_of = table.slot_of.tolist(), table.expert_of.tolist()
    assert all(slot_of[expert] == slot for slot, expert in enumerate(expert_of) if expert >= 0)
    assert all(expert_of[slot] == expert for expert, slot in enumerate(slot_of) if slot > 0)


@pytest.fixture(scope="module", params=DEVICES)
def on(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fused(on: str) -> dict[str, Trace]:
    traces, built = serve(on, moe_backend="fused")
    assert built.engine.plan.backend == "fused"
    return traces


def test_a_second_run_gives_the_same_bits(on: str, fused: dict[str, Trace]) -> None:
    assert serve(on, moe_backend="fused")[0] == fused


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("slots", [12, 90])
def test_streaming_fetching_and_prefetching_change_no_bit(
    slots: int, prefetch: int, on: str, fused: dict[str, Trace]
) -> None:
    traces, built = serve(on, moe_backend="offload", moe_cache_size=slots, moe_prefetch=prefetch)
    stats = built.engine.runner.experts.stats
    assert traces == fused
    assert stats.prefill_link_bytes and stats.fills and bool(stats.ahead_tiles) == bool(prefetch)


@needs_native
@pytest.mark.parametrize("backend", ["hybrid", "cpu"])
def test_the_hosts_help_stays_within_its_rounding(backend: str, on: str, fused: dict[str, Trace]) -> None:
    """Over equal prefixes: an earlier different token makes another text."""
    traces, built = serve(on, moe_backend=backend, moe_cache_rate=None if backend == "cpu" else 0.3)
    stats = built.engine.runner.experts.stats
    assert stats.cpu_tiles and bool(stats.filled_tiles) == (backend == "hybrid")
    for name, trace in traces.items():
        for (mine, a), (theirs, b) in zip(trace, fused[name], strict=True):
            assert abs(a - b) < 0.25
            if mine != theirs:
                break


def test_a_prompt_that_is_done_ends_no_step_of_another(on: str) -> None:
    """Who answers the device sleeps once all announced steps are over; a prompt's pass is none of them."""
    built = opened(on, moe_backend="offload", moe_cache_size=12)
    served, experts = Served(built), built.engine.runner.experts
    under_way, least, wake, end_step = [0], [0], experts.wake, experts.end_step

    def announced() -> None:
        under_way[0] += 1
        wake()

    def ended(seconds: float) -> None:
        under_way[0] -= 1
        least.append(under_way[0])
        end_step(seconds)

    experts.wake, experts.end_step = announced, ended
    served.submit("runs", text_ids(built, 1, 7), 12)
    served.step(3)
    served.submit("comes", text_ids(built, 0, 150), 4)
    served.run()
    built.close()
    assert built.engine.stats.jobs, "the prompt was no job"
    assert under_way == [0] and min(least) == 0 and len(least) >= 12


@pytest.mark.parametrize("failing", [0, 3])
def test_a_resize_under_load_changes_no_bit(failing: int, on: str, fused: dict[str, Trace]) -> None:
    """The third allocation of each resize fails: serving goes on as before."""
    if on == "cuda":
        pytest.skip("its memory is not counted to the megabyte: see `ft bench elastic`")
    rng, asked = random.Random(4), []

    def between(built: Built, step: int) -> None:
        built.device.faults.fail_alloc = failing
        if rng.random() < 0.5:
            asked.append(built.engine.resize(rng.randrange(68, 97) * MIB))

    traces, built = serve(on, between, moe_backend="offload")
    done = [f.exception() is None for f in asked if f.done()]
    assert traces == fused and len(done) >= 3 and (all(done) or failing)
    assert built.engine.stats.resizes >= 1


@pytest.mark.gpu
def test_over_a_played_link_the_same_bits_come_later() -> None:
    """A prompt's copies and a step's fills go through one link, whose rate plan and split believe in."""
    wishes = {"moe_backend": "offload", "moe_cache_size": 12}
    fast, _ = serve("cuda", **wishes)
    served = Served(opened("cuda", sim_link_bw=0.2, **wishes))
    device, stats = served.built.device, served.engine.runner.experts.stats
    assert device.machine.link_bw == 0.2e9 and device.slow_link is not None
    device.synchronize()
    began, before = time.perf_counter(), int(device.slow_link[0])
    for name, size in enumerate(PROMPTS):
        served.submit(str(name), text_ids(served.built, name, size), TOKENS)
        served.step(2)
    served.run()
    served.engine.runner.experts.settle()
    device.synchronize()
    took = time.perf_counter() - began
    came = stats.prefill_link_bytes + stats.link_bytes
    assert {name: served.trace(name) for name in fast} == fast
    assert came / 0.2e9 < took and came / 0.2e9 <= 1e-9 * (int(device.slow_link[0]) - before)
    served.close()
