"""A simulated GPU: the CPU computes, a limit stands for VRAM, a virtual clock for link, host and GPU.

The same stream, split, slot and arena code runs here as on a real device, in CI. Rates come from a
`Machine` and may change while running. A forgotten wait changes tokens: see `_virtual`. The only
real time here is what the arithmetic takes; `clock` never looks at it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freetoken.core.errors import DeviceError
from freetoken.core.interfaces import Clock, Device, Event, Faults, Pool, Stream
from freetoken.core.machine import GB, Machine, preset
from freetoken.core.options import Options
from freetoken.devices._pool import POISON, HostPool, Ledger
from freetoken.devices._virtual import FOREVER, Delivery, Link, Rates, Transfer

DEADLINE_S = 1.0
DEFAULT_MACHINE = "4060-laptop"
_KERNELS = ("compute", "host")


class SimClock(Clock):
    """The time that `compute` has reached."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device

    def now(self) -> float:
        return self._device.compute.now_s


class SimEvent(Event):
    """What its stream had seen and done when it was recorded."""

    def __init__(self, device: SimDevice, seen: tuple[int, ...], at_s: float, last: Transfer | None) -> None:
        self._device, self.seen, self._at_s, self._last = device, seen, at_s, last

    def done(self) -> bool:
        """A successful poll orders what `compute` runs from now on after the event."""
        compute = self._device.compute
        if self._last is not None and self._last.end_s is None:
            self._device.link.advance(compute.now_s)
        ended = self._last is None or (self._last.end_s is not None and self._last.end_s <= compute.now_s)
        if not ended or self._at_s > compute.now_s:
            return False
        compute.see(self.seen)
        return True

    def time_s(self) -> float:
        end = self._device.link.run_until(self._last) if self._last is not None else 0.0
        return max(self._at_s, end)


class SimStream(Stream):
    """`now_s` is where a kernel stream has got to, or the earliest start of a copy stream's next copy."""

    def __init__(self, device: SimDevice, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.now_s = 0.0
        self.seen = [0] * (index + 1)
        self.pending: deque[Delivery] = deque()
        self._device = device
        self._is_kernel = name in _KERNELS
        self._last: Transfer | None = None
        self._waited = False

    def copy(self, dst: Tensor, src: Tensor) -> None:
        device = self._device
        seq = self.tick()
        if not dst.is_meta:
            broken = not self._is_kernel and device.is_read_by_compute(dst, self.seen[0])
            dst.view(torch.uint8).fill_(POISON)
            self.pending.append(Delivery(seq, dst, src, broken, device.faults.corrupt_copy))
        if not self._is_kernel:
            self._transfer(src.numel() * src.element_size())

    def record(self) -> Event:
        self.tick()
        return SimEvent(self._device, tuple(self.seen), self.now_s, self._last)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        if self._device.drops_this_wait():
            return
        at = event.time_s()
        if at == FOREVER and self._is_kernel:
            self.now_s += DEADLINE_S
            raise DeviceError(
                f"A copy did not complete within {DEADLINE_S:.0f} s.",
                code="device_deadline",
                hint="Restart the engine; if it comes again, check the link and the driver's log.",
            )
        self.see(event.seen)
        self.now_s = max(self.now_s, at)
        self._waited = True

    def charge(self, num_bytes: float, flops: float) -> None:
        if self.name == "host":
            self._charge_host(num_bytes, flops)
        elif self._is_kernel:
            machine = self._device.machine
            self.now_s += max(num_bytes / machine.gpu_bw, flops / machine.gpu_flops)

    def see(self, seen: Sequence[int]) -> None:
        """Order what comes after everything in `seen`, and deliver what that covers."""
        self.seen += [0] * (len(seen) - len(self.seen))
        for other, seq in enumerate(seen):
            self.seen[other] = max(self.seen[other], seq)
        self._device.deliver(self)

    def _charge_host(self, num_bytes: float, flops: float) -> None:
        device = self._device
        machine = device.machine
        if self._waited:
            self.now_s += machine.cpu_fixed_s + device.faults.stall_host_s
            self._waited = False
        self.now_s = max(device.link.host_read(self.now_s, num_bytes), self.now_s + flops / machine.cpu_flops)

    def _transfer(self, num_bytes: int) -> None:
        device = self._device
        ready = max(self.now_s, device.compute.now_s)
        extra = device.faults.delay_copy_s
        if self._waited:
            extra += device.machine.fill_fixed_s
            self._waited = False
        self._last = Transfer(self.index, num_bytes, ready, extra)
        if device.faults.hang_copy:
            self._last.end_s = FOREVER
        else:
            device.link.enqueue(self._last)

    def tick(self) -> int:
        """Advance and return the stream's own order number."""
        self.seen[self.index] += 1
        return self.seen[self.index]


class SimPool(HostPool):
    """Remembers which units `compute` last read, so that an unordered overwrite shows."""

    def __init__(
        self, device: SimDevice, name: str, unit_bytes: int, num_units: int, bounds: tuple[int, int]
    ):
        super().__init__(name, unit_bytes, num_units, bounds, device.ledger, device.phantom)
        self._device = device
        self.last_read = np.zeros(self.max_units, np.int64)
        self.read_bytes = np.zeros(self.max_units, np.int64)
        self.base = 0 if device.phantom else self._buffer.data_ptr()

    def used(self, units: np.ndarray, num_bytes: int) -> None:
        self.last_read[units] = self._device.compute.tick()
        self.read_bytes[units] = num_bytes

    def relocate(self, src: Sequence[int], dst: Sequence[int]) -> None:
        super().relocate(src, dst)
        self._device.charge(2.0 * len(src) * self.unit_bytes, 0.0)


class SimDevice(Device):
    """seed != 0 stretches and reorders copies at random within the rules; `phantom` pools have no bytes.

    num_waits counts stream waits, so that a test can drop each in turn (`faults.drop_wait`).
    """

    name = "sim"
    in_host_memory = True
    compute: SimStream

    def __init__(
        self, machine: Machine, *, memory_bytes: int = 0, seed: int = 0, phantom: bool = False
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.memory_bytes = memory_bytes or machine.gpu_memory
        self.phantom = phantom
        self.faults = Faults()
        self.num_waits = 0
        self.ledger = Ledger(self.memory_bytes, self.faults)
        self._rates = Rates(machine, 0.25 if seed else 0.0, random.Random(seed))
        self.machine = machine
        self.link = Link(self._rates)
        self._streams: dict[str, SimStream] = {}
        self._pools: list[SimPool] = []
        self.compute = self._stream("compute")
        self.clock = SimClock(self)

    def set_rates(self, **rates: float) -> None:
        """Change any of Machine's rates from now on, as a throttle or a busy neighbour would."""
        self.machine = self._rates.machine = self.machine.with_rates(**rates)

    def stream(self, name: str) -> Stream:
        return self._stream(name)

    def pool(self, name: str, unit_bytes: int, num_units: int, *, min_units: int, max_units: int) -> Pool:
        pool = SimPool(self, name, unit_bytes, num_units, (min_units, max_units))
        self._pools.append(pool)
        return pool

    def free_bytes(self) -> int:
        return self.ledger.free_bytes

    def taken_bytes(self) -> int:
        unplanned = self.faults.unplanned_bytes
        return sum(self.ledger.mapped.values()) + unplanned if unplanned else 0

    def charge(self, num_bytes: float, flops: float) -> None:
        self.compute.charge(num_bytes, flops)

    def bucket(self, rows: int) -> int:
        return 1 << max(0, rows - 1).bit_length()

    def synchronize(self) -> None:
        end = self.link.drain()
        for stream in self._streams.values():
            end = max(end, stream.now_s)
        for stream in self._streams.values():
            self.compute.see(stream.seen)
        for stream in self._streams.values():
            stream.see(self.compute.seen)
            stream.now_s = end

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def deliver(self, reader: SimStream) -> None:
        """Complete the copies of other streams that `reader` is now ordered after."""
        for stream in self._streams.values():
            covered = reader.seen[stream.index] if stream.index < len(reader.seen) else 0
            while stream is not reader and stream.pending and stream.pending[0].seq <= covered:
                item = stream.pending.popleft()
                if item.zeros:
                    item.dst.zero_()
                elif not item.broken:
                    item.dst.copy_(item.src)

    def drops_this_wait(self) -> bool:
        self.num_waits += 1
        if self.faults.drop_wait:
            self.faults.drop_wait -= 1
            return not self.faults.drop_wait
        return False

    def is_read_by_compute(self, dst: Tensor, seen: int) -> bool:
        """True if `dst` lies in bytes that compute read last later than `seen` of its order."""
        at = dst.data_ptr()
        for pool in self._pools:
            unit, offset = divmod(at - pool.base, pool.unit_bytes)
            if 0 <= unit < pool.max_units:
                end = unit - (-(offset + dst.numel() * dst.element_size()) // pool.unit_bytes)
                late = pool.last_read[unit:end] > seen
                late[0] &= offset < pool.read_bytes[unit]
                return bool((late & (pool.read_bytes[unit:end] > 0)).any())
        return False

    def _stream(self, name: str) -> SimStream:
        if name not in self._streams:
            self._streams[name] = SimStream(self, name, len(self._streams))
        return self._streams[name]


def create(options: Options) -> Device:
    """Open the simulated device that --machine, --gpu-memory, --sim-link-bw and --sim-host-bw describe."""
    machine = preset(options.machine or DEFAULT_MACHINE)
    if options.sim_link_bw:
        machine = machine.with_rates(link_bw=options.sim_link_bw * GB)
    if options.sim_host_bw:
        machine = machine.with_rates(host_bw=options.sim_host_bw * GB)
    return SimDevice(machine, memory_bytes=options.gpu_memory or 0, seed=options.sim_seed)
