"""Residency never changes a bit: slots, evictions, cut experts, resizes, jitter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core import choices
from freetoken.core.errors import CapacityError, DeviceError
from freetoken.core.machine import preset
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.policies.lru import POLICY as Lru
from freetoken.experts.setup import ExpertSetup
from tests.experts.build import EXACT, NUMERICS, config, drain, inputs, tiny

MODEL = config(3, 12, 3, 48, 64)
SLOW = preset("4060-laptop")
MACHINE = SLOW.with_rates(  # tiny tiles take time
    link_bw=SLOW.link_bw / 1000, host_bw=SLOW.host_bw / 1000, cpu_flops=SLOW.cpu_flops / 1000
)


def make(name, made, *, slots, device=None, numerics=NUMERICS, **options):
    device = device or SimDevice(MACHINE, seed=1)
    setup = ExpertSetup(
        made.config, made.bank, device, numerics, policy=Lru(), num_slots=slots, native=False, **options
    )
    return choices.load("freetoken.experts.backends", name).create(setup)


def walk(backend, made, steps, *, rows=1, seed=0, exact=False, dead=0, before_step=None):
    """Run decode steps and compare every layer with the plain answer."""
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        started = backend.device.clock.now()
        for layer in range(made.bank.num_layers):
            x, routing = inputs(made.config, rows, seed + 97 * step + layer, dead, skew=0.7)
            backend.begin(layer, x, routing, None)
            got = backend.finish(layer)
            assert torch.equal(got, made.reference(layer, x, routing, exact)), (step, layer)
        backend.end_step(backend.device.clock.now() - started)
        backend.slots.check()


def sums(backend):
    stats = backend.stats
    assert stats.hits + stats.misses == stats.requests
    assert stats.missing_tiles == stats.filled_tiles + stats.cpu_tiles
    return stats


@pytest.mark.parametrize("slots", [6, 7, 9, 20, 36])
@pytest.mark.parametrize("name", ["offload", "hybrid"])
@pytest.mark.parametrize("device", [CpuDevice, lambda: SimDevice(MACHINE, seed=3)], ids=["cpu", "sim"])
def test_any_number_of_slots_gives_the_plain_answer(name, slots, device):
    made = tiny(MODEL)
    backend = make(name, made, slots=slots, device=device())
    walk(backend, made, 6)
    walk(backend, made, 3, rows=7, seed=1000, dead=2)
    stats = sums(backend)
    assert stats.misses > 0 and (slots < 30 or stats.hits > 0)


def test_exact_mode_gives_the_plain_answer_in_any_place():
    made = tiny(MODEL)
    walk(make("hybrid", made, slots=7, numerics=EXACT, threads=2), made, 4, rows=3, exact=True)


@pytest.mark.parametrize("seed", range(1, 6))
def test_late_and_reordered_copies_never_change_a_bit(seed):
    made = tiny(config(2, 10, 4, 32, 64), seed)
    backend = make("hybrid", made, slots=9, device=SimDevice(MACHINE, seed=seed))
    walk(backend, made, 12, seed=seed, rows=1 + seed % 2)
    assert sums(backend).cpu_tiles > 0 < backend.stats.filled_tiles


@pytest.mark.parametrize("name", ["offload", "hybrid"])
def test_resizing_at_random_steps_keeps_serving(name):
    made = tiny(MODEL)
    backend = make(name, made, slots=20)
    draw = np.random.default_rng(5)
    before = []

    def resize(step):
        before.append(backend.slots.num_resident)
        backend.resize(int(draw.integers(1, 40)))
        assert backend.slots.num_resident >= min(before[-1], backend.slots.num_slots)

    walk(backend, made, 14, before_step=resize)
    sums(backend)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_failed_resize_leaves_the_old_size_serving(fails):
    made = tiny(MODEL)
    backend = make("hybrid", made, slots=20)
    walk(backend, made, 3)
    backend.device.faults.fail_alloc = fails
    failed = 0
    for slots in (12, 30, 8):
        try:
            backend.resize(slots)
        except CapacityError as error:
            assert error.code == "out_of_device_memory"
            failed += 1
        walk(backend, made, 2, seed=slots)
    assert failed == 1


def one_run(made, drop=0, name="hybrid"):
    backend = make(name, made, slots=6, device=SimDevice(MACHINE))
    backend.slots.verify_every = 0
    backend.device.faults.drop_wait = drop
    out = []
    for step in range(3):
        for layer in range(made.bank.num_layers):
            x, routing = inputs(made.config, 1, 31 * step + layer)
            backend.begin(layer, x, routing, None)
            out.append(backend.finish(layer))
        backend.end_step(1e-3)
    return torch.stack(out), backend.device.num_waits


@pytest.mark.parametrize("name", ["offload", "hybrid", "cpu"])
def test_dropping_any_single_wait_changes_the_result(name):
    made = tiny(config(2, 8, 3, 32, 64))
    want, waits = one_run(made, 0, name) if name != "cpu" else cpu_run(made, 0)
    assert waits > 10 and not want.isnan().any()
    for k in range(1, waits + 1):
        got, _ = one_run(made, k, name) if name != "cpu" else cpu_run(made, k)
        assert not torch.equal(got, want), f"wait {k} of {waits} can be dropped"


def cpu_run(made, drop):
    backend = make("cpu", made, slots=0, device=SimDevice(MACHINE))
    backend.device.faults.drop_wait = drop
    out = []
    for layer in range(12):
        x, routing = inputs(made.config, 1, layer)
        backend.begin(layer % 2, x, routing, None)
        out.append(backend.finish(layer % 2))
    return torch.stack(out), backend.device.num_waits


def test_a_copy_that_delivers_zeros_is_noticed():
    made = tiny(MODEL)
    backend = make("offload", made, slots=8)
    backend.device.faults.corrupt_copy = True
    x, routing = inputs(made.config, 1, 0)
    backend.begin(0, x, routing, None)
    with pytest.raises(DeviceError, match="damaged"):
        backend.finish(0)


def test_a_copy_that_never_ends_is_an_error_after_the_deadline():
    made = tiny(MODEL)
    backend = make("offload", made, slots=8)
    backend.device.faults.hang_copy = True
    x, routing = inputs(made.config, 1, 0)
    backend.begin(0, x, routing, None)
    with pytest.raises(DeviceError, match="did not complete"):
        backend.finish(0)


def test_the_cpu_takes_light_experts_and_the_link_brings_heavy_ones():
    made = tiny(config(1, 8, 2, 32, 64))
    backend = make("hybrid", made, slots=8)
    ids = torch.tensor([[0, 1]] * 30 + [[2, 3]], dtype=torch.int32)
    x, routing = inputs(made.config, 31, 0)
    routing = type(routing)(ids, routing.weights)
    backend.begin(0, x, routing, None)
    assert torch.equal(backend.finish(0), made.reference(0, x, routing))
    assert backend.slots.tiles_in[backend.slots.slot_of[:2]].tolist() == [4, 4]
    assert backend.stats.cpu_tiles > 0


def test_the_fetch_cap_and_the_cpu_layers_hold():
    made = tiny(MODEL)
    backend = make("hybrid", made, slots=20, max_fetch=1, cpu_layers=1)
    filled = []
    submit = backend._queue.submit
    backend._queue.submit = lambda fills: filled.append(fills) or submit(fills)
    walk(backend, made, 8, rows=2)
    assert max(len(fills) for fills in filled) == 1
    assert all(fill.expert >= 12 for fills in filled for fill in fills)


def test_a_static_placement_is_loaded_once_and_stays():
    made = tiny(MODEL)
    backend = make("hybrid", made, slots=10, static=True)
    backend.preload(list(range(5, 15)))
    resident = backend.slots.expert_of.copy()
    walk(backend, made, 5)
    assert (backend.slots.expert_of == resident).all() and backend.stats.filled_tiles == 0
    assert sums(backend).hits > 0


def test_the_recorder_sees_every_layer_step():
    made = tiny(MODEL)
    backend = make("offload", made, slots=8)
    seen = []
    backend.on_routing = lambda layer, ids: seen.append((layer, tuple(ids.shape)))
    walk(backend, made, 2, rows=4)
    assert seen == [(layer, (4, 3)) for _ in range(2) for layer in range(3)]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_placement_never_changes_a_bit(data):
    compare_placements(data)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_placement_never_changes_a_bit_over_many_draws(data):
    compare_placements(data)


def compare_placements(data):
    """Slots, seeds, threads, ring groups, resizes and batch sizes drawn at random."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    layers, experts = draw(1, 3), draw(6, 12)
    model = config(layers, experts, draw(1, 4), 16 * draw(1, 4), 16 * draw(1, 5))
    made = tiny(model, draw(0, 99))
    total = layers * experts
    backend = make(
        data.draw(st.sampled_from(["offload", "hybrid"])),
        made,
        slots=draw(6, max(6, total)),
        device=SimDevice(MACHINE, seed=draw(0, 50)),
        threads=draw(1, 3),
        max_fetch=draw(0, 2),
        ring_group=draw(0, 4),
        chunk_tokens=draw(3, 20),
    )
    for phase in range(3):
        walk(backend, made, draw(1, 3), rows=draw(1, 5), seed=1000 * phase)
        if data.draw(st.booleans()):
            backend.resize(draw(1, total))
        rows = draw(1, 30)
        backend.begin_job(rows)
        for layer in range(layers):
            x, routing = inputs(model, rows, 77 + layer)
            want, cut = [], backend.setup.chunk_tokens
            for a in range(0, rows, cut):
                part = type(routing)(routing.ids[a : a + cut], routing.weights[a : a + cut])
                want.append(made.reference(layer, x[a : a + cut], part))
            assert torch.equal(drain(backend.stream_layer(layer, x, routing))[0], torch.cat(want))
        backend.end_job()
    backend.slots.check()
    sums(backend)
    backend.close()


def test_torch_threads_never_change_a_bit():
    made = tiny(config(1, 8, 4, 256, 64))
    x, routing = inputs(made.config, 9, 0)
    before, out = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        backend = make("hybrid", made, slots=8)
        backend.begin(0, x, routing, None)
        out.append(backend.finish(0))
    torch.set_num_threads(before)
    assert torch.equal(*out)
