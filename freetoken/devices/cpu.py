"""The CPU as a device: host memory, wall time, everything eager. Slow is the default and the oracle.

Memory is shared with the host (`owns_memory` is False), so expert records are used in place and
nothing is copied over a link. A copy is complete when `Stream.copy` returns; waits have nothing to do.
"""

from __future__ import annotations

import time

import psutil
import torch
from torch import Tensor

from freetoken.core import profile
from freetoken.core.host_memory import host_memory
from freetoken.core.interfaces import Clock, Device, Event, Faults, Pool, Stream
from freetoken.core.machine import Machine
from freetoken.core.options import Options
from freetoken.devices._pool import HostPool, Ledger


class WallClock(Clock):
    def now(self) -> float:
        return time.perf_counter()


class DoneEvent(Event):
    """A point in the past."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def done(self) -> bool:
        return True

    def time_s(self) -> float:
        return self._at_s


class EagerStream(Stream):
    def __init__(self, name: str) -> None:
        self.name = name

    def copy(self, dst: Tensor, src: Tensor) -> None:
        if not dst.is_meta:
            dst.copy_(src)

    def record(self) -> Event:
        return DoneEvent(time.perf_counter())

    def wait(self, event: Event) -> None:
        """Nothing to wait for: work is complete when it is enqueued."""


class CpuDevice(Device):
    """`phantom` pools have sizes but no bytes, for models of shapes only."""

    name = "cpu"
    in_host_memory = True
    owns_memory = False
    run_ahead = False

    def __init__(self, memory_bytes: int = 0, phantom: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.memory_bytes = memory_bytes or host_memory().free_bytes
        measured = profile.load()
        guessed = ("link_bw", "gpu_bw", "gpu_flops", *(() if measured else ("host_bw",)))
        self.machine = Machine(
            name="cpu",
            host_bw=measured.host_bw if measured else 20e9,
            link_bw=20e9,
            gpu_bw=20e9,
            gpu_flops=400e9,
            gpu_memory=0,
            host_memory=int(psutil.virtual_memory().total),
            approximate=guessed,
        )
        self.clock = WallClock()
        self.faults = Faults()
        self.phantom = phantom
        self._ledger = Ledger(self.memory_bytes, self.faults)
        self._streams: dict[str, EagerStream] = {}
        self._pools: list[HostPool] = []
        self.compute = self.stream("compute")

    def stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, EagerStream(name))

    def pool(self, name: str, unit_bytes: int, num_units: int, *, min_units: int, max_units: int) -> Pool:
        pool = HostPool(name, unit_bytes, num_units, (min_units, max_units), self._ledger, self.phantom)
        self._pools.append(pool)
        return pool

    def free_bytes(self) -> int:
        return self._ledger.free_bytes

    def synchronize(self) -> None:
        """Everything is complete already."""

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self._pools.clear()


def create(options: Options) -> Device:
    return CpuDevice()
