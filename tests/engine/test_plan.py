"""The planner: sums never exceed the budget, wishes are honoured or refused with the arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.machine import preset
from freetoken.core.options import Options
from freetoken.core.units import GIB, MIB
from freetoken.engine.budget import Demand, Sizes, divide
from freetoken.engine.plan import HOST_ROOM, Facts, make_plan

SIZES = Sizes(
    dense_bytes=2 * GIB, page_bytes=MIB, page_size=16, state_bytes=8 * MIB,
    record_bytes=6 * MIB, num_experts=10240, activation_bytes=512 * MIB,
)  # fmt: skip


def facts(device: str = "sim", free: int = 24 * GIB, machine: str = "4090", **kw) -> Facts:
    base = dict(
        model_name="m", sizes=SIZES, experts_per_token=320, expert_flops=6e6, max_position=65536,
        device=device, owns_memory=device != "cpu", in_host_memory=True, free_bytes=free,
        host_free_bytes=256 * GIB, machine=preset(machine), has_states=True, run_ahead=True, min_slots=4,
    )  # fmt: skip
    return Facts(**{**base, **kw})


@given(
    st.integers(0, 64 * GIB),
    st.integers(1, 40),
    st.integers(2, 5000),
    st.one_of(st.none(), st.integers(2, 10241)),
)
def test_the_parts_never_exceed_the_total(total, states, pages, slots):
    demand = Demand(states, pages, 10**6, slots, 2)
    try:
        division = divide(total, SIZES, demand)
    except CapacityError as e:
        assert "wanted" in e.message and "available" in e.message
        return
    assert division.used_bytes <= total
    assert division.num_pages >= pages
    assert slots is None or division.num_slots == slots


def test_cpu_computes_experts_where_they_lie():
    plan = make_plan(Options(), facts("cpu"))
    assert plan.backend == "cpu" and plan.memory.num_slots == 0


def test_a_pool_that_fits_is_fused_and_one_that_does_not_is_split():
    assert make_plan(Options(), facts(free=90 * GIB)).backend == "fused"
    assert make_plan(Options(), facts()).backend == "hybrid"


def test_who_asks_for_fewer_slots_than_experts_gets_them_though_all_would_fit():
    for wish in (Options(moe_cache_rate=0.37), Options(moe_cache_size=3789)):
        plan = make_plan(wish, facts(free=90 * GIB))
        assert plan.backend == "hybrid" and plan.memory.num_slots == 3790
        assert any("3789 of 10240 experts have slots, as asked" in r for r in plan.reasons)
    assert make_plan(Options(moe_cache_rate=1.0), facts(free=90 * GIB)).backend == "fused"


def test_a_small_card_serves_fewer_requests_at_once_rather_than_none():
    large = replace(SIZES, state_bytes=64 * MIB)
    plan = make_plan(Options(), facts(sizes=large, free=4 * GIB))
    assert 2 <= plan.max_running < 8 and any("requests at once" in r for r in plan.reasons)
    assert make_plan(Options(), facts(sizes=large, free=40 * GIB)).max_running == 32
    with pytest.raises(CapacityError):
        make_plan(Options(max_running_requests=32), facts(sizes=large, free=4 * GIB))


def test_the_kv_reserve_is_a_floor_not_a_limit():
    plan = make_plan(Options(), facts())
    assert plan.kv_tokens >= 8192 and plan.max_model_len == 65536
    assert any("KV grows" in r for r in plan.reasons)


def test_explicit_slots_are_honoured_and_the_rest_goes_to_kv():
    plan = make_plan(Options(moe_cache_size=1000), facts())
    assert plan.memory.num_slots == 1001
    assert plan.kv_tokens > 8192


def test_more_slots_than_memory_shows_the_sum():
    with pytest.raises(CapacityError) as e:
        make_plan(Options(moe_cache_size=9000), facts())
    assert "9001 expert slots 52.7 GiB" in e.value.message and "24.0 GiB available" in e.value.message


def test_more_slots_than_experts_is_refused():
    with pytest.raises(CapacityError) as e:
        make_plan(Options(moe_cache_size=20000), facts(free=900 * GIB))
    assert e.value.code == "too_many_slots"


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
def test_slot_backends_need_a_device_with_memory(backend):
    with pytest.raises(ConfigError) as e:
        make_plan(Options(moe_backend=backend), facts("cpu"))
    assert e.value.code == "backend_needs_gpu"


def test_few_slots_never_get_plain_lru():
    plan = make_plan(Options(moe_cache_size=300), facts())
    assert plan.policy != "lru" and any("token cycles" in r for r in plan.reasons)


def test_a_context_beyond_the_models_positions_is_refused():
    with pytest.raises(ConfigError):
        make_plan(Options(max_model_len=70000), facts())


@pytest.mark.parametrize(
    "wishes",
    [{"exact": True, "dtype": "bfloat16"}, {"moe_cache_size": 100, "moe_cache_rate": 0.5}],
)
def test_wishes_that_contradict_each_other_are_refused(wishes):
    with pytest.raises(ConfigError) as e:
        make_plan(Options(**wishes), facts())
    assert e.value.code == "invalid_option" and e.value.hint


def test_a_kv_reserve_of_zero_holds_back_one_page():
    assert make_plan(Options(kv_reserve_tokens=0), facts()).min_pages == 2


def test_checkpoints_get_their_share_of_host_memory_and_the_plan_says_so():
    plan = make_plan(Options(checkpoint_memory=80 * MIB), facts())
    assert plan.checkpoint_slots == 10
    assert plan.memory.num_states == plan.max_running + 1 + plan.checkpoint_units
    assert any("10 states of 8.00 MiB in host memory" in line for line in plan.lines())
    without = make_plan(Options(checkpoint_memory=0), facts())
    assert plan.host_bytes == without.host_bytes + 80 * MIB
    bank = SIZES.num_experts * SIZES.record_bytes
    auto = make_plan(Options(), facts(host_free_bytes=bank + HOST_ROOM + 8 * GIB, in_host_memory=False))
    assert auto.checkpoint_slots == GIB // (8 * MIB)


def test_host_memory_counts_all_that_lies_in_it_and_the_refusal_shows_the_sum():
    bank = SIZES.num_experts * SIZES.record_bytes
    for where, free in (("cpu", bank + GIB), ("sim", bank + 20 * GIB)):
        with pytest.raises(CapacityError) as e:
            make_plan(Options(), facts(where, host_free_bytes=free, host_limited_by="container limit"))
        assert e.value.code == "host_memory"
        for part in ("experts 60.0 GiB", "states", "KV pages", "activations and rope 512 MiB", "available"):
            assert part in e.value.message
    assert "container limit" in e.value.message
    with pytest.raises(CapacityError, match="dense weights 2.00 GiB"):
        make_plan(Options(), facts("cpu", host_free_bytes=bank + GIB))


@given(st.integers(0, 200 * GIB), st.sampled_from(["cpu", "sim"]), st.booleans())
def test_no_plan_takes_more_of_host_memory_than_there_is(free, where, states):
    some = facts(where, host_free_bytes=free, has_states=states)
    try:
        plan = make_plan(Options(), replace(some, free_bytes=min(some.free_bytes, free)))
    except CapacityError as e:
        assert "wanted" in e.message and "available" in e.message
        return
    assert plan.host_bytes <= free


def test_kv_shrinks_before_a_model_that_fits_is_refused():
    bank = SIZES.num_experts * SIZES.record_bytes
    room = HOST_ROOM + 8 * GIB
    tight = make_plan(Options(), facts("cpu", free=bank + room, host_free_bytes=bank + room))
    ample = make_plan(Options(), facts("cpu", free=bank + 64 * GIB, host_free_bytes=bank + 64 * GIB))
    assert 0 < tight.kv_tokens < ample.kv_tokens


def test_models_without_states_and_engines_without_a_cache_need_no_checkpoints():
    for plan in (
        make_plan(Options(), facts(has_states=False)),
        make_plan(Options(prefix_cache=False), facts()),
    ):
        assert plan.checkpoint_units == plan.checkpoint_slots == 0


def test_a_wish_without_meaning_here_is_accepted_and_explained():
    plan = make_plan(Options(moe_cache_size=10, gpu_memory=GIB, sim_link_bw=5.0), facts("cpu"))
    said = [r for r in plan.reasons if "is not used" in r]
    assert [r.split()[0] for r in said] == ["--moe-cache-size", "--gpu-memory", "--sim-link-bw"]
    assert not any("is not used" in r for r in make_plan(Options(moe_cache_size=1000), facts()).reasons)


def test_a_host_that_cannot_read_the_experts_gets_no_share_of_them() -> None:
    """hybrid is only chosen where the native library computes what the device leaves to it."""
    plans = [make_plan(Options(), replace(facts(free=8 * GIB), host_computes=able)) for able in (True, False)]
    assert plans[1].backend == "offload"
    if plans[0].backend == "hybrid":
        assert any("native library" in reason for reason in plans[1].reasons)
