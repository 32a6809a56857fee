"""Residency never changes a bit: slots, evictions, cut experts, resizes, jitter."""

import numpy as np
import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import CapacityError, DeviceError
from freetoken.core.machine import preset
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.policies.lru import POLICY as Lru
from freetoken.experts.setup import ExpertSetup
from tests.experts.build import EXACT, NUMERICS, config, inputs, tiny

MODEL = config(3, 12, 3, 48, 64)
SLOW = preset("4060-laptop")
MACHINE = SLOW.with_rates(link_bw=SLOW.link_bw / 1000, host_bw=SLOW.host_bw / 1000)  # tiny tiles take time


def make(name, made, *, slots, device=None, numerics=NUMERICS, **options):
    device = device or SimDevice(MACHINE, seed=1)
    setup = ExpertSetup(made.config, made.bank, device, numerics, policy=Lru(), num_slots=slots, **options)
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
