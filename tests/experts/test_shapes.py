"""Control code at real geometries on the virtual clock: balance, shares, prefill time, guard."""

import itertools

import numpy as np
import pytest

from freetoken.core.machine import GB, PRESETS
from freetoken.devices.sim import SimDevice
from freetoken.experts.backends import cpu, hybrid, offload
from freetoken.experts.policies.lru import POLICY as Lru
from freetoken.experts.shape_only import Shape, ShapeOnly, even_routing

QWEN = Shape(40, 256, 8, 2048, 512, 6291456, num_tiles=16, dense_bytes=3.9e9, layer_fixed_s=35e-6)
FLASH = Shape(43, 256, 6, 4096, 2048, 13369344, num_tiles=64, dense_bytes=8e9, layer_fixed_s=35e-6)
SMALL = Shape(4, 64, 4, 2048, 512, 6291456, num_tiles=16, dense_bytes=4e8, layer_fixed_s=35e-6)
SHARES = {
    "3090": 0.44,
    "4090": 0.38,
    "5090-server": 0.68,
    "5090-desktop": 0.98,
    "4060-laptop": 0.25,
    "pro-6000": 0.30,
}


def build(shape, machine, make=hybrid, slots=16, **options):
    device = SimDevice(machine.with_rates(gpu_memory=1 << 40), phantom=True)
    return ShapeOnly(shape, device, make=make.create, policy=Lru(), num_slots=slots, **options)


def steps(shape, count, seed=0, skew=0.9):
    """Routings with a stable popularity of experts in every layer."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, shape.num_experts + 1) ** -skew
    share /= share.sum()
    order = [rng.permutation(shape.num_experts) for _ in range(shape.num_layers)]
    for _ in range(count):
        yield np.stack([o[rng.choice(shape.num_experts, shape.top_k, replace=False, p=share)] for o in order])


def never_the_same(shape):
    """Routings that never hit: every step takes the next experts."""
    for at in itertools.count():
        first = at * shape.top_k + np.arange(shape.top_k)
        yield np.tile(first % shape.num_experts, (shape.num_layers, 1))


def best_share(machine, shape, missing):
    """Brute force over whole tiles: the largest of the fastest fill counts, as a share."""
    tile = shape.expert_bytes / shape.num_tiles
    link, slow, fast = machine.link_bw, machine.host_bw_beside_link, machine.host_bw
    times = []
    for q in range(missing + 1):
        fill = (machine.fill_fixed_s + q * tile / link + q * tile / machine.gpu_bw) if q else 0.0
        busy = q * tile / link
        left = (missing - q) * tile
        read = left / slow if left <= busy * slow else busy + (left - busy * slow) / fast
        times.append(max(fill, machine.cpu_fixed_s + read if q < missing else 0.0))
    least = min(times)
    return max(q for q, t in enumerate(times) if t <= least * (1 + 1e-6)), times


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("published", [True, False])
def test_fill_shares_agree_with_brute_force_and_with_the_published_ratio(name, published):
    machine = PRESETS[name]
    if published:  # its model knows neither fixed costs nor what the GPU takes
        machine = machine.with_rates(fill_fixed_s=0.0, cpu_fixed_s=0.0, gpu_bw=1e18)
    model = build(SMALL, machine)
    routings, missing = never_the_same(SMALL), SMALL.top_k * SMALL.num_tiles
    for routing in itertools.islice(routings, 60):
        model.step(routing)
    before = model.stats.filled_tiles
    for routing in itertools.islice(routings, 20):
        model.step(routing)
    filled = (model.stats.filled_tiles - before) / (20 * SMALL.num_layers)
    assert abs(filled - best_share(machine, SMALL, missing)[0]) <= 1.0
    if published:
        assert abs(filled / missing - SHARES[name]) <= 1.0 / missing


@pytest.mark.parametrize("dram", [0.0, 200 * GB])
@pytest.mark.parametrize("shape", [SMALL, FLASH], ids=["16 tiles", "64 tiles"])
def test_both_branches_end_within_one_tile(shape, dram):
    machine = PRESETS["5090-server"].with_rates(dram_bw=dram)
    model = build(shape, machine, slots=64)
    missing = shape.top_k * shape.num_tiles
    routings = never_the_same(shape)
    for routing in itertools.islice(routings, 25):
        model.step(routing)
    seen = []
    model.backend.controller.observe = lambda bucket, fill, cpu: seen.append((fill, cpu))
    model.step(next(routings))
    (q, t_p), (c, t_c) = seen[-1]
    assert q + c == missing and q > 0 < c
    tile_s = shape.expert_bytes / shape.num_tiles / min(machine.link_bw, machine.host_bw_beside_link)
    assert abs(t_p - t_c) <= tile_s


def test_a_slower_host_moves_the_split_within_20_steps():
    machine = PRESETS["5090-server"].with_rates(dram_bw=300 * GB)
    model = build(SMALL, machine)
    routings = never_the_same(SMALL)
    missing = SMALL.top_k * SMALL.num_tiles

    def filled(count):
        before = model.stats.filled_tiles
        for routing in itertools.islice(routings, count):
            model.step(routing)
        return (model.stats.filled_tiles - before) / (count * SMALL.num_layers)

    filled(30)
    usual = filled(5)
    slower = model.device.machine.host_bw / 3
    model.device.set_rates(host_bw=slower)
    filled(20)
    want = best_share(model.device.machine, SMALL, missing)[0]
    assert want > usual + 5
    assert abs(filled(5) - want) <= 1.5


def test_hybrid_hits_as_often_as_offload_once_warm():
    rates = {}
    for make in (hybrid, offload):
        model = build(SMALL, PRESETS["4060-laptop"], make, slots=90)
        for number, routing in enumerate(steps(SMALL, 500)):
            if number == 250:
                before = model.stats.hits, model.stats.requests
            model.step(routing)
        stats = model.stats
        rates[make] = (stats.hits - before[0]) / (stats.requests - before[1])
    assert abs(rates[hybrid] - rates[offload]) <= 0.02, rates


def test_a_cpu_slowed_twentyfold_makes_hybrid_leave():
    model = build(SMALL, PRESETS["4060-laptop"], slots=64)
    alone = build(SMALL, PRESETS["4060-laptop"], offload, slots=64)
    routings = list(steps(SMALL, 80, skew=0.5))
    for routing in routings[:30]:
        model.step(routing)
        alone.step(routing)
    machine = model.device.machine
    model.device.set_rates(host_bw=machine.host_bw / 20)
    model.device.faults.stall_host_s = 0.005
    took = [model.step(routing) for routing in routings[30:60]]
    link_only = [alone.step(routing) for routing in routings[30:60]]
    assert sum(took[-10:]) <= 1.2 * sum(link_only[-10:]), (took, link_only)


def test_the_guard_returns_when_the_cpu_has_recovered():
    model = build(SMALL, PRESETS["4060-laptop"], slots=64)
    routings = list(steps(SMALL, 50, skew=0.5))
    model.device.faults.stall_host_s = 0.02
    for at in range(60):
        model.step(routings[at % 50])
    guard = model.backend.controller.guard
    assert guard.left
    model.device.faults.stall_host_s = 0.0
    for at in range(600):
        model.step(routings[at % 50])
    assert not guard.left


def recurrence(machine, shape, layer_loads, layer_costs, dense_s, group, groups, overlap):
    """When a prefill ends, written down independently: loads, buffers and products in order."""
    copy_s = shape.expert_bytes / machine.link_bw
    link = gpu = 0.0
    freed = [0.0] * groups
    used = 0
    for experts, cost in zip(layer_loads, layer_costs, strict=True):
        gpu += dense_s
        for at in range(0, experts, group):
            count = min(group, experts - at)
            start = max(link, freed[used % groups] if overlap else gpu)
            link = start + machine.fill_fixed_s + count * copy_s
            gpu = max(gpu, link) + count * cost
            freed[used % groups] = gpu
            used += 1
    return gpu


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["5090-server", "4060-laptop"])
def test_a_long_prefill_takes_what_a_recurrence_predicts(name, overlap):
    shape = Shape(6, 64, 8, 2048, 512, 6291456, dense_params=3e8)
    machine = PRESETS[name]
    tokens = 8192
    model = build(shape, machine, offload, slots=40, overlap=overlap, chunk_tokens=tokens)
    rng = np.random.default_rng(0)
    took = model.prefill(tokens, lambda layer: even_routing(rng, tokens, shape))
    pool = shape.num_layers * shape.num_experts * shape.expert_bytes
    assert model.stats.prefill_link_bytes <= pool
    absent = [64] * 6
    dense_s = 2.0 * shape.dense_params / 6 * tokens / machine.gpu_flops
    flops = 6.0 * 2048 * 512 * tokens * 8 / 64
    cost = max(flops / machine.gpu_flops, shape.expert_bytes / machine.gpu_bw)
    ring = model.backend._ring
    want = recurrence(machine, shape, absent, [cost] * 6, dense_s, ring.group, 3 if overlap else 1, overlap)
    layer = want / 6
    assert abs(took - want) <= 0.03 * want + (layer if overlap else 0.5 * layer)
    whole = 384 * (shape.expert_bytes / machine.link_bw + cost) + 6 * dense_s
    if overlap:
        assert took < 0.97 * whole
    else:
        assert took == pytest.approx(whole, rel=0.03)


def test_a_short_suffix_costs_what_its_routed_experts_cost():
    model = build(QWEN, PRESETS["5090-server"], offload, slots=400, chunk_tokens=64)
    ids = even_routing(np.random.default_rng(1), 50, QWEN)
    routed = len(np.unique(ids))
    model.prefill(50, lambda layer: ids)
    assert model.stats.prefill_link_bytes == 40 * routed * QWEN.expert_bytes


def test_the_cpu_backend_runs_at_host_speed():
    machine = PRESETS["5090-server"]
    model = build(SMALL, machine, cpu)
    took = model.step(next(never_the_same(SMALL)))
    read = SMALL.num_layers * SMALL.top_k * SMALL.expert_bytes / machine.host_bw
    assert read < took < read + SMALL.num_layers * 80e-6 + SMALL.dense_bytes / machine.gpu_bw
