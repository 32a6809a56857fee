"""Pages and states leave the device and come back whole while the device works on, whatever runs when."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from freetoken.core.errors import DeviceError
from freetoken.core.interfaces import Device
from freetoken.core.machine import preset
from freetoken.devices.sim import SimDevice
from freetoken.engine import host_units as units_module
from freetoken.engine.cold import ColdTier
from freetoken.engine.disk import DiskTier
from freetoken.engine.host_units import HostUnits
from freetoken.engine.states import StateMover

from .late import LateDevice

PAGE, STATE, PAGES, SLOTS, UNIT = 64, 160, 12, 4, 1
"""A state takes two and a half units."""


def content(name: int, size: int) -> torch.Tensor:
    return torch.randint(1, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(name))


def key(name: int) -> bytes:
    return name.to_bytes(16, "big")


class World:
    """A device's pages and host slots, and a tier; what is called `name` always holds content(name).

    wrong  what a kernel or the host read that was not what it should have been
    """

    def __init__(self, device: LateDevice, max_bytes: int, disk: DiskTier | None = None) -> None:
        self.device = device
        self.kv = device.pool("kv", PAGE, PAGES, min_units=1, max_units=PAGES)
        self.state = device.pool("state", STATE, 3, min_units=1, max_units=3)
        self.mover = StateMover(device, self.kv, self.state, SLOTS)
        self.tier = ColdTier(device, self.kv, self.mover, max_bytes, disk)
        self.max_bytes, self.has_disk, self.wrong, self.num_loads = max_bytes, disk is not None, 0, 0

    def compute(self, page: int, data: torch.Tensor) -> None:
        """A kernel writes a page."""
        self.device.compute.run(lambda: self.kv.view()[page].copy_(data))

    def expect(self, page: int, data: torch.Tensor) -> None:
        """A kernel reads a page."""
        self.device.compute.run(lambda: self.note(self.kv.view()[page], data))

    def note(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        self.wrong += not torch.equal(found, wanted)

    def leave(self, names: list[int], first: int) -> None:
        """Pages hold these names, are evicted, and overwritten at once."""
        for i, name in enumerate(names):
            self.compute(first + i, content(name, PAGE))
        for i, name in enumerate(names):
            self.tier.put_page(key(name), b"", first + i)
        self.tier.carry_out()
        for i in range(len(names)):
            self.compute(first + i, torch.zeros(PAGE, dtype=torch.uint8))

    def come_back(self, names: list[int], first: int) -> None:
        loaded = [self.tier.load_page(key(name), b"", first + i) for i, name in enumerate(names)]
        self.tier.carry_out()
        for i, name in enumerate(names):
            if loaded[i]:
                self.num_loads += 1
                self.expect(first + i, content(name, PAGE))

    def save(self, data: torch.Tensor, slot: int) -> None:
        self.mover.wait_saved(UNIT)
        self.device.compute.run(lambda: self.state.view()[UNIT].copy_(data))
        self.mover.save_state(UNIT, slot)

    def leave_state(self, name: int, slot: int) -> None:
        """A state is saved to a slot, gives way, and another is saved there at once."""
        self.save(content(name, STATE), slot)
        self.tier.put_state(key(name), b"rest", slot)
        self.tier.carry_out()
        self.save(torch.zeros(STATE, dtype=torch.uint8), slot)

    def state_comes_back(self, name: int, slot: int) -> None:
        known = b"rest" in self.tier.rests(key(name))
        came = self.tier.load_state(key(name), b"rest", slot)
        assert not (came and not known) and (came == known or self.has_disk), "a disk's limit is its own"
        self.tier.carry_out()
        if came:
            self.num_loads += 1
            self.mover.load_state(slot, UNIT + 1)
            self.device.compute.run(lambda: self.note(self.state.view()[UNIT + 1], content(name, STATE)))

    def check(self) -> None:
        counts = self.tier.snapshot()
        assert counts["cold_bytes"] <= counts["cold_memory_bytes"] <= self.max_bytes
        assert self.wrong == 0


def play(world: World, seed: int, count: int = 150) -> None:
    """Names of pages are even, of states odd; some batches are larger than the tier."""
    rng = random.Random(seed)
    for _ in range(count):
        first, length = rng.randrange(1, 6), rng.randrange(1, 6)
        start = 2 * rng.randrange(24)
        names = [start + 2 * i for i in range(length)]
        action = rng.random()
        if action < 0.4:
            world.leave(rng.sample(names, length), first)
        elif action < 0.7:
            known = [name for name in names if world.tier.has_page(key(name), b"")]
            world.come_back(known, first)
        elif action < 0.85:
            world.leave_state(start + 1, rng.randrange(SLOTS))
        else:
            world.state_comes_back(start + 1, rng.randrange(SLOTS))
        world.check()
    world.device.synchronize()
    world.check()


@pytest.mark.parametrize("max_bytes", [4 * PAGE, 20 * PAGE + 7, 1 << 16])
@pytest.mark.parametrize("first", ["", "compute", "states"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_whatever_comes_back_is_what_left(tmp_path: Path, first: str, max_bytes: int, on_disk: bool) -> None:
    for seed in range(2):
        disk = DiskTier(tmp_path / str(seed), "m", 40 * PAGE) if on_disk else None
        world = World(LateDevice(first, seed), max_bytes, disk)
        play(world, seed)
        assert world.num_loads >= 4
        if on_disk:
            world.tier.flush()
            again = World(LateDevice(first, seed), max_bytes, DiskTier(tmp_path / str(seed), "m", 40 * PAGE))
            play(again, seed + 100, 50)
        world.tier.close()


def scene(drop: int, first: str) -> tuple[int, int]:
    """Wrong reads, waits: pages out and back, each batch right behind kernels that use the same pages."""
    world = World(LateDevice(first, drop=drop), 16 * PAGE)
    world.leave([0, 2, 4], 1)
    world.leave([6, 8], 5)
    for names, page in (([0, 6, 4], 8), ([8, 2], 1), ([6], 3)):
        world.compute(page, content(99, PAGE))
        world.expect(page, content(99, PAGE))
        world.come_back(names, page)
        world.leave([names[0] + 20], page)
    world.compute(9, content(99, PAGE))
    world.expect(9, content(99, PAGE))
    world.come_back([20, 28, 26], 9)
    world.device.synchronize()
    return world.wrong, world.device.num_waits


def test_dropping_any_single_wait_shows() -> None:
    """A wait for `compute` matters where copies run first, a wait of `compute` where kernels do."""
    wrong, waits = scene(0, "")
    assert wrong == 0 and waits == 18, "two waits a batch"
    for k in range(1, waits + 1):
        assert any(scene(k, first)[0] for first in ("compute", "states")), (
            f"wait {k} of {waits} can be dropped"
        )


@pytest.mark.parametrize("in_one_batch", [False, True])
def test_the_host_writes_to_units_only_behind_the_copies_out_of_them(in_one_batch: bool) -> None:
    """A state takes the place of pages that are on their way back to the device."""
    world = World(LateDevice("compute"), 4 * PAGE)
    world.save(content(1, STATE), 1)
    world.leave([0, 2, 4], 1)
    world.device.synchronize()
    assert world.mover.is_saved(UNIT), "only the pages are still to be waited for"
    for i, name in enumerate([0, 2, 4]):
        assert world.tier.load_page(key(name), b"", 5 + i)
    if not in_one_batch:
        world.tier.carry_out()
    world.tier.put_state(key(1), b"rest", 1)
    world.tier.carry_out()
    for i, name in enumerate([0, 2, 4]):
        world.expect(5 + i, content(name, PAGE))
    world.device.synchronize()
    world.check()


def test_pages_of_one_eviction_are_one_batch_and_neighbours_one_copy() -> None:
    device = LateDevice()
    kv = device.pool("kv", PAGE, 600, min_units=1, max_units=600)
    tier = ColdTier(device, kv, StateMover(device, kv, None, 0), 1 << 16, None)
    for page in range(1, 513):
        tier.put_page(key(page), b"", page)
    tier.carry_out()
    copies = device.stream("states").num_copies
    assert device.num_waits == 2 and tier.snapshot()["cold_batches"] == 1
    assert copies == 512 * PAGE // ((1 << 16) // units_module.LEAST_SLABS), "a copy a slab"
    tier.carry_out()
    assert device.num_waits == 2, "nothing to do"
    for page in range(1, 513):
        assert tier.load_page(key(page), b"", page)
    tier.carry_out()
    assert device.num_waits == 4 and device.stream("states").num_copies == 2 * copies


def test_copies_that_fail_leave_nothing_behind() -> None:
    device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 20)
    kv = device.pool("kv", PAGE, 8, min_units=1, max_units=8)
    tier = ColdTier(device, kv, StateMover(device, kv, None, 0), 1 << 12, None)
    tier.put_page(key(1), b"", 1)
    tier.carry_out()
    device.faults.hang_copy = True
    tier.put_page(key(2), b"", 2)
    with pytest.raises(DeviceError, match="did not complete"):
        tier.carry_out()
    assert tier.has_page(key(1), b"") and not tier.has_page(key(2), b"")
    assert tier.snapshot()["cold_bytes"] == PAGE


# --- memory ---


def until_made(units: HostUnits, num_bytes: int) -> None:
    """A guard against hangs, no measurement."""
    end = time.monotonic() + 60
    while units.slab_bytes < num_bytes or units._maker is not None:
        assert time.monotonic() < end, f"{units.slab_bytes} of {num_bytes}"
        time.sleep(0.001)


def test_slabs_are_locked_ahead_of_need_and_by_another_thread() -> None:
    device = LateDevice()
    units = HostUnits(device, 1024, 1 << 20)
    until_made(units, 1 << 18)
    assert units.locked_bytes == 1 << 18, "a quarter of the limit lies ready"
    for _ in range(4):
        assert units.take(64) is not None
        until_made(units, units.num_used * 1024 + (1 << 18))
    assert set(device.lockers) == {"freetoken-cold-memory"}
    assert units.take(1024 - 256) is not None and units.take(1) is None
    assert units.slab_bytes == units.locked_bytes == 1 << 20 == sum(device.pinned.values())
    units.close()
    units.close()
    assert not device.pinned and units.slab_bytes == 0 and units.take(1) is None


def test_a_device_in_host_memory_takes_memory_only_when_it_is_needed() -> None:
    units = HostUnits(SimDevice(preset("4060-laptop"), memory_bytes=1 << 20), 1024, 1 << 20)
    assert units.slab_bytes == 0
    assert units.take(1) is not None and units.slab_bytes == 1 << 16


@pytest.mark.parametrize("lock", [0, 1 << 17])
def test_memory_that_the_system_does_not_lock_serves_all_the_same(
    lock: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(LateDevice(lock=lock), 1 << 19)
    world.tier._units.take(world.tier._units.capacity - 40)
    play(world, 1)
    counts = world.tier.snapshot()
    assert counts["cold_locked_bytes"] == lock < counts["cold_memory_bytes"]
    assert len([r for r in caplog.records if "can't be locked" in r.message]) == 1
    world.tier.close()
    assert not world.device.pinned


def test_without_more_memory_the_limit_falls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device: Device = SimDevice(preset("4060-laptop"), memory_bytes=1 << 20)
    units = HostUnits(device, 1024, 1 << 20)
    assert units.take(64) is not None

    def none_left(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(units_module.torch, "empty", none_left)
    assert units.take(1) is None and units.capacity == 64
    assert "no more host memory" in caplog.records[-1].message


def test_a_closed_tier_holds_nothing() -> None:
    world = World(LateDevice(), 1 << 16)
    world.leave([0, 2], 1)
    world.device.synchronize()
    world.tier.close()
    assert not world.device.pinned and not world.tier.has_page(key(0), b"")
    world.leave([4], 1)
    assert not world.tier.has_page(key(4), b"")
