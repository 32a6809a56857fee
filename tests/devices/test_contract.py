"""One contract for every device: pools, streams, events, clock, faults."""

import numpy as np
import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.machine import preset
from freetoken.core.options import Options
from freetoken.devices import cuda
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice

MIB = 1 << 20
DEVICES = {
    "cpu": lambda: CpuDevice(memory_bytes=64 * MIB),
    "sim": lambda: SimDevice(preset("4060-laptop"), memory_bytes=64 * MIB),
    "sim with jitter": lambda: SimDevice(preset("4060-laptop"), memory_bytes=64 * MIB, seed=7),
}


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("name", choices.names("freetoken.devices"))
def test_a_device_opens_from_options(name):
    if name == "cuda" and not cuda.usable():
        with pytest.raises(ConfigError, match="GPU"):
            cuda.create(Options(device="cuda"))
        return
    device = choices.load("freetoken.devices", name).create(Options(device=name))
    assert device.name == name and device.memory_bytes > 0
    assert device.compute is device.stream("compute")
    assert device.stream("fill") is device.stream("fill")


def test_a_copy_is_there_after_a_wait(device):
    src, dst = torch.arange(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    fill = device.stream("fill")
    fill.copy(dst, src)
    event = fill.record()
    device.compute.wait(event)
    assert torch.equal(dst, src)
    assert event.done() and event.time_s() <= device.clock.now()


def test_copies_of_a_stream_complete_in_order(device):
    dst, fill, events = torch.zeros(8, dtype=torch.int32), device.stream("fill"), []
    for value in range(8):
        fill.copy(dst[value : value + 1], torch.tensor([value], dtype=torch.int32))
        events.append(fill.record())
    device.compute.wait(events[-1])
    times = [event.time_s() for event in events]
    assert times == sorted(times) and all(event.done() for event in events)
    assert dst.tolist() == list(range(8))


def test_synchronise_completes_everything(device):
    tensors = [(torch.zeros(64), torch.rand(64)) for _ in range(6)]
    for i, (dst, src) in enumerate(tensors):
        device.stream(f"s{i % 3}").copy(dst, src)
    device.synchronize()
    assert all(torch.equal(dst, src) for dst, src in tensors)


def test_the_clock_never_runs_backwards(device):
    times = [device.clock.now()]
    for _ in range(20):
        device.charge(1e6, 1e6)
        device.stream("fill").copy(torch.zeros(10), torch.ones(10))
        device.compute.wait(device.stream("fill").record())
        times.append(device.clock.now())
    assert times == sorted(times)


def test_mapped_units_are_zero_and_unmapped_ones_are_poisoned(device):
    pool = device.pool("kv", 256, 8, min_units=2, max_units=16)
    assert pool.view().shape == (8, 256) and not pool.view().any()
    old = pool.view()
    old.fill_(3)
    generation = pool.generation
    pool.resize(4)
    assert pool.view().shape[0] == 4 and (pool.view() == 3).all()
    assert (old[4:] == 255).all() and pool.generation != generation
    pool.resize(16)
    assert not pool.view()[4:].any() and (pool.view()[:4] == 3).all()
    assert pool.view().data_ptr() == old.data_ptr()


def test_relocate_moves_whole_units(device):
    pool = device.pool("kv", 128, 8, min_units=1, max_units=8)
    pool.view().copy_(torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 128))
    pool.relocate([6, 7], [1, 2])
    assert pool.view()[:, 0].tolist() == [0, 6, 7, 3, 4, 5, 6, 7]


def test_what_does_not_fit_shows_the_sum_and_changes_nothing(device):
    device.pool("kv", MIB, 40, min_units=1, max_units=100)
    with pytest.raises(CapacityError, match=r"kv 40.0 MiB \+ experts 32.0 MiB = 72.0 MiB.*64.0 MiB"):
        device.pool("experts", MIB, 32, min_units=1, max_units=64)
    assert device.free_bytes() == 24 * MIB
    small = device.pool("experts", MIB, 20, min_units=1, max_units=64)
    with pytest.raises(CapacityError):
        small.resize(30)
    assert small.num_units == 20 and device.free_bytes() == 4 * MIB
    small.resize(5)
    assert device.free_bytes() == 19 * MIB


@pytest.mark.parametrize("units", [0, 65])
def test_a_pool_keeps_its_bounds(device, units):
    pool = device.pool("experts", 64, 20, min_units=1, max_units=64)
    with pytest.raises(CapacityError, match="1 to 64"):
        pool.resize(units)


def test_the_kth_allocation_fails_when_asked_to(device):
    device.faults.fail_alloc = 2
    pool = device.pool("a", 64, 4, min_units=1, max_units=8)
    with pytest.raises(CapacityError):
        pool.resize(8)
    assert pool.num_units == 4
    pool.resize(8)
    assert pool.num_units == 8


def test_close_gives_everything_back_and_can_be_repeated(device):
    device.pool("kv", MIB, 40, min_units=1, max_units=100)
    device.close()
    device.close()
    assert device.free_bytes() == 64 * MIB


def test_a_decode_bucket_holds_its_rows(device):
    for rows in range(1, 40):
        assert rows <= device.bucket(rows) <= 2 * rows


def test_phantom_pools_count_but_hold_nothing():
    device = SimDevice(preset("3090"), phantom=True)
    pool = device.pool("experts", 6 << 20, 3000, min_units=1, max_units=3500)
    assert pool.view().is_meta and device.free_bytes() == (24 << 30) - 3000 * (6 << 20)
    pool.used(np.array([1]), 10)
