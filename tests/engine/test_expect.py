"""Expected speeds: intervals that move the right way and name what bounds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.errors import CapacityError
from freetoken.core.machine import PRESETS, Machine, preset
from freetoken.core.options import Options
from freetoken.core.units import GIB
from freetoken.engine.expect import MISSES, Expectation, expect, misses
from freetoken.engine.plan import make_plan
from freetoken.models import qwen3_moe
from tests.engine.test_plan import facts
from tests.engine.test_preflight import LARGE

CONFIG = qwen3_moe.FAMILY.read_config(LARGE)


def expected(machine: Machine, where: str = "sim", **wishes) -> Expectation:
    some = facts(where, host_free_bytes=512 * GIB, in_host_memory=where == "cpu", has_states=False)
    some = replace(some, machine=machine, free_bytes=machine.gpu_memory or 512 * GIB)
    return expect(CONFIG, some.sizes, make_plan(Options(**wishes), some), machine, where != "cpu")


@pytest.mark.parametrize("name", PRESETS)
def test_every_machine_gets_intervals_with_reasons(name: str) -> None:
    found = expected(preset(name))
    assert 0 < found.decode[0] < found.decode[1]
    assert [n for n, _ in found.ttft] == [512, 4096, 32768]
    lows = [t[0] for _, t in found.ttft]
    assert lows == sorted(lows) and all(0 < low < high for _, (low, high) in found.ttft)
    assert any("dense weights" in reason for reason in found.reasons)
    assert any("experts" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("rate", "backend"), [("gpu_bw", "hybrid"), ("link_bw", "offload"), ("host_bw", "hybrid")]
)
def test_a_faster_memory_or_link_is_faster_where_it_counts(rate: str, backend: str) -> None:
    machine = preset("4090")
    one = expected(machine, moe_backend=backend)
    two = expected(replace(machine, **{rate: 2 * getattr(machine, rate)}), moe_backend=backend)
    assert two.decode[0] >= one.decode[0] and two.decode[1] >= one.decode[1]
    assert two.decode != one.decode


def test_more_slots_miss_less_and_decode_faster() -> None:
    few = expected(preset("4090"), moe_cache_size=500)
    many = expected(preset("4090"), moe_cache_size=3000)
    assert many.decode[0] > few.decode[0] and many.decode[1] > few.decode[1]


def test_a_guessed_rate_widens_the_interval_and_is_named() -> None:
    machine = Machine("m", 60e9, 25e9, 1000e9, 100e12, 0, 512 * GIB)
    sure = expected(machine, "cpu")
    guess = expected(replace(machine, approximate=("host_bw",)), "cpu")
    assert guess.decode[0] < sure.decode[0] and guess.decode[1] > sure.decode[1]
    assert any("guessed: host_bw" in reason for reason in guess.reasons)
    assert not any("guessed" in reason for reason in sure.reasons)


@given(st.floats(0, 1), st.floats(0, 1))
def test_misses_fall_with_the_share_and_stay_probabilities(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert misses(high)[0] <= misses(low)[0] + 1e-9 and misses(high)[1] <= misses(low)[1] + 1e-9
    assert 0 <= misses(low)[0] <= misses(low)[1] <= 1


def test_the_recorded_shares_are_given_back() -> None:
    for share, few, many in MISSES:
        assert misses(share) == pytest.approx((few, many))


def test_a_plan_that_fails_has_nothing_to_expect() -> None:
    with pytest.raises(CapacityError):
        expected(replace(preset("4060-laptop"), gpu_memory=GIB))
