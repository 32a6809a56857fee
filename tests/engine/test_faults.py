"""A device in trouble: requests in flight fail with a code or wait it out, and the engine serves on."""

import pytest

from freetoken.core.errors import FreeTokenError
from freetoken.core.units import MIB

from .served import Served, serve, text_ids

SIM = dict(device="sim", machine="4060-laptop", gpu_memory=96 * MIB, max_model_len=2048, moe_cache_size=60)


def served(backend: str, **wishes) -> Served:
    return serve(**{**SIM, "moe_backend": backend, **wishes})


def good_trace(backend: str):
    s = served(backend)
    s.submit("a", text_ids(s.built, 1, 40), 10)
    s.run()
    s.close()
    return s.trace("a")


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
@pytest.mark.parametrize(
    ("fault", "code"), [("hang_copy", "device_deadline"), ("corrupt_copy", "corrupt_copy")]
)
def test_a_failed_device_fails_what_runs_and_refuses_the_rest(backend, fault, code):
    """No hang, no answer from zeros, and no 200 afterwards: residency can't be trusted any more."""
    s = served(backend)
    setattr(s.built.device.faults, fault, True)
    s.submit("a", text_ids(s.built, 1, 40), 10)
    s.submit("b", text_ids(s.built, 2, 40), 10)
    with pytest.raises(FreeTokenError) as e:
        s.run()
    assert e.value.code == code
    s.submit("late", text_ids(s.built, 1, 40), 10)
    with pytest.raises(FreeTokenError) as e:
        s.run()
    assert e.value.code == "engine_failed" and s.engine.error is not None
    s.close()


@pytest.mark.parametrize("fault", [{"stall_host_s": 0.01}, {"delay_copy_s": 0.01}])
def test_a_slow_neighbour_costs_time_and_changes_no_bit(fault):
    s = served("hybrid")
    for name, value in fault.items():
        setattr(s.built.device.faults, name, value)
    s.submit("a", text_ids(s.built, 1, 40), 10)
    s.run()
    assert s.trace("a") == good_trace("hybrid")
    s.close()


@pytest.mark.soak
def test_a_cpu_twenty_times_slower_makes_the_engine_leave_hybrid():
    s = served("hybrid", max_model_len=4096)
    s.built.device.faults.stall_host_s = 0.02
    s.submit("a", text_ids(s.built, 1, 20), 700, logprobs=None)
    s.run()
    assert s.engine.runner.experts.stats.extra["hybrid_left"] == 1.0
    s.close()


def test_a_device_that_fails_from_the_start_never_becomes_ready():
    s = served("offload")
    s.built.device.faults.hang_copy = True
    with pytest.raises(FreeTokenError) as e:
        s.engine.self_test()
    assert e.value.code == "device_deadline"
    s.close()


def test_the_self_test_leaves_no_trace_in_the_counters():
    s = served("hybrid")
    s.engine.self_test()
    assert s.engine.stats.requests == s.engine.stats.output_tokens == 0
    s.submit("a", text_ids(s.built, 1, 40), 10)
    s.run()
    assert s.trace("a") == good_trace("hybrid")
    s.close()
