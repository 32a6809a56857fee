"""The simulated device: poison until a wait, one shared link, contention, rates that change."""

import pytest
import torch

from freetoken.core.errors import DeviceError
from freetoken.core.machine import GB, preset
from freetoken.devices.sim import SimDevice

MACHINE = preset("5090-server").with_rates(link_bw=1e9, host_bw=4e9, fill_fixed_s=0.0, cpu_fixed_s=0.0)


def million(value=1.0):
    return torch.full((250_000,), value)


def test_bytes_are_nan_until_a_wait_covers_the_copy():
    device = SimDevice(MACHINE)
    dst, fill = million(0.0), device.stream("fill")
    fill.copy(dst, million())
    event = fill.record()
    assert dst.isnan().all()
    device.charge(10 * MACHINE.gpu_bw, 0)
    assert dst.isnan().all(), "time alone orders nothing"
    device.compute.wait(event)
    assert (dst == 1).all()


def test_reused_targets_are_nan_again():
    device = SimDevice(MACHINE)
    dst, fill = million(0.0), device.stream("fill")
    for _ in range(2):
        fill.copy(dst, million())
        assert dst.isnan().all()
        device.compute.wait(fill.record())
        assert (dst == 1).all()


def test_a_wait_covers_nothing_that_came_later():
    device = SimDevice(MACHINE)
    first, second, fill = million(0.0), million(0.0), device.stream("fill")
    fill.copy(first, million())
    event = fill.record()
    fill.copy(second, million())
    device.compute.wait(event)
    assert (first == 1).all() and second.isnan().all()


def test_waits_are_transitive():
    device = SimDevice(MACHINE)
    dst = million(0.0)
    device.stream("fill").copy(dst, million())
    device.stream("ring").wait(device.stream("fill").record())
    device.compute.wait(device.stream("ring").record())
    assert (dst == 1).all()


def test_a_poll_delivers_only_once_the_copy_has_ended():
    device = SimDevice(MACHINE)
    dst, fill = million(0.0), device.stream("fill")
    fill.copy(dst, million())
    event = fill.record()
    assert not event.done() and dst.isnan().all()
    device.charge(0.5e-3 * MACHINE.gpu_bw, 0)
    assert not event.done()
    device.charge(0.6e-3 * MACHINE.gpu_bw, 0)
    assert event.done() and (dst == 1).all()


def test_overwriting_what_a_kernel_may_still_read_shows():
    device = SimDevice(MACHINE)
    pool = device.pool("experts", 1024, 4, min_units=1, max_units=4)
    src, fill = torch.ones(1024, dtype=torch.uint8), device.stream("fill")
    pool.used([2], 1024)
    fill.copy(pool.view()[2], src)
    device.compute.wait(fill.record())
    assert (pool.view()[2] == 255).all()
    fill.wait(device.compute.record())
    fill.copy(pool.view()[2], src)
    device.compute.wait(fill.record())
    assert (pool.view()[2] == 1).all()


def test_copies_share_the_link_and_take_turns():
    device = SimDevice(MACHINE)
    ring, fill = device.stream("ring"), device.stream("fill")
    for _ in range(5):
        ring.copy(million(), million())
    fill.copy(million(), million())
    mine, last = fill.record(), ring.record()
    assert mine.time_s() <= 2.001e-3, "a fill waits for one ring piece at most"
    assert last.time_s() == pytest.approx(6e-3)


def test_the_host_slows_down_only_where_memory_saturates():
    def host_time(dram):
        device = SimDevice(MACHINE.with_rates(dram_bw=dram))
        device.stream("fill").copy(million(), million())
        host = device.stream("host")
        host.charge(3.5e6, 0)
        return host.record().time_s()

    assert host_time(10e9) == pytest.approx(3.5e6 / 4e9)
    # the link takes 1 of 4 GB/s during its first millisecond
    assert host_time(4e9) == pytest.approx(1e-3 + (3.5e6 - 3e6) / 4e9)


def test_rates_change_while_running():
    device = SimDevice(MACHINE)
    fill = device.stream("fill")
    fill.copy(million(), million())
    device.compute.wait(fill.record())
    assert device.clock.now() == pytest.approx(1e-3)
    device.set_rates(link_bw=0.5e9)
    fill.copy(million(), million())
    device.compute.wait(fill.record())
    assert device.clock.now() == pytest.approx(3e-3)


def test_a_seed_decides_the_order_and_nothing_else():
    def times(seed):
        device = SimDevice(MACHINE, seed=seed)
        for i in range(6):
            device.stream(f"s{i % 3}").copy(million(), million())
        return [device.stream(f"s{i}").record().time_s() for i in range(3)]

    assert times(1) == times(1) and times(1) != times(2)


def test_faults_delay_stall_hang_and_corrupt():
    device = SimDevice(MACHINE)
    fill, host, dst = device.stream("fill"), device.stream("host"), million(0.0)
    device.faults.delay_copy_s = 0.25
    fill.copy(dst, million())
    device.compute.wait(fill.record())
    assert device.clock.now() == pytest.approx(0.251)
    device.faults.delay_copy_s, device.faults.stall_host_s = 0.0, 0.5
    host.wait(device.compute.record())
    host.charge(4e6, 0)
    assert host.record().time_s() == pytest.approx(0.752)
    device.faults.corrupt_copy = True
    fill.copy(dst, million())
    device.compute.wait(fill.record())
    assert not dst.any()
    device.faults.hang_copy = True
    fill.copy(dst, million())
    event = fill.record()
    assert not event.done()
    with pytest.raises(DeviceError, match="did not complete") as error:
        device.compute.wait(event)
    assert error.value.code == "device_deadline" and error.value.hint


def test_a_dropped_wait_orders_nothing():
    device = SimDevice(MACHINE)
    dst = million(0.0)
    device.faults.drop_wait = 1
    device.stream("fill").copy(dst, million())
    event = device.stream("fill").record()
    device.compute.wait(event)
    assert dst.isnan().all() and device.num_waits == 1
    device.compute.wait(event)
    assert (dst == 1).all()


def test_options_choose_machine_memory_and_rates():
    from freetoken.core.options import Options
    from freetoken.devices.sim import create

    device = create(Options(device="sim", machine="3090", gpu_memory=1 << 30, sim_link_bw=10, sim_host_bw=20))
    assert device.memory_bytes == 1 << 30
    assert device.machine.link_bw == 10 * GB and device.machine.host_bw == 20 * GB
