"""An NVIDIA GPU: torch's streams and events, an arena over the driver's virtual memory, pinned host memory.

Picks the card, states what is too old, measures the link once. `compute` is the stream that torch is on.
Pools, torch's own memory and the driver's share are kept within `memory_bytes`; what the driver itself says
that this process takes is told beside it.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core import env, profile
from freetoken.core.errors import CapacityError, ConfigError, DeviceError
from freetoken.core.interfaces import Clock, Device, Event, Faults, Pool, Stream
from freetoken.core.log import logger
from freetoken.core.machine import GB, Machine, slow_link
from freetoken.core.options import Options
from freetoken.core.units import MIB, format_bytes
from freetoken.devices._arena import ArenaPool
from freetoken.devices._driver import Driver, open_driver
from freetoken.devices._nvml import open_nvml
from freetoken.devices._pool import Ledger

_log = logger("cuda")
FLOOR = (8, 0)
"""Least compute capability: bfloat16 products."""
PROBE_BYTES = 64 * MIB
CONTEXT_BYTES = 400 * MIB
"""What a context takes at least."""
CODE_BYTES = 192 * MIB
"""Room for the code of kernels, which is loaded when they are first used."""
LATER_BYTES = 128 * MIB
"""What the driver may take for kernels and graphs that are first used while serving."""
_BANDWIDTH = {(8, 0): 1.5e12, (9, 0): 3.9e12, (10, 0): 7e12}
_FLOPS = {(8, 0): 250e12, (9, 0): 600e12, (10, 0): 1200e12}


class WallClock(Clock):
    def now(self) -> float:
        return time.perf_counter()


class CudaEvent(Event):
    """Completion is known to the device's timer relative to an origin that the device renews."""

    def __init__(self, event: torch.cuda.Event, origin: torch.cuda.Event, origin_s: float) -> None:
        self.event, self._origin, self._origin_s = event, origin, origin_s

    def done(self) -> bool:
        return bool(self.event.query())

    def time_s(self) -> float:
        self.event.synchronize()
        return float(self._origin_s + self._origin.elapsed_time(self.event) * 1e-3)


class CudaStream(Stream):
    def __init__(self, name: str, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self.name, self._device, self.stream = name, device, stream

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self.copy_all([(dst, src)])

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._device.rehearsing:
            return
        with torch.cuda.stream(self.stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)
                self._device.pace(dst, src)

    def record(self) -> Event:
        return self._device.event(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if not self._device.drops_this_wait():
            self.stream.wait_event(event.event)


class CudaDevice(Device):
    name = "cuda"
    kernels = captures = compiles = locks_memory = True

    def __init__(self, index: int = 0, memory_bytes: int = 0, link_bw: float = 0.0) -> None:
        """link_bw: bytes a second of a slower link to play, 0 = the one that is there."""
        nvml, driver = open_nvml(), open_driver()
        before = nvml.used_bytes() if nvml is not None else {}
        if driver is None or not torch.cuda.is_available():
            raise ConfigError(
                "No usable NVIDIA GPU was found.",
                code="no_gpu",
                hint="Install NVIDIA's driver and PyTorch's CUDA build, or use --device cpu.",
            )
        _grow_in_place()
        self._driver: Driver = driver
        self.index = index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.capability = torch.cuda.get_device_capability(index)
        _, total = torch.cuda.mem_get_info(index)
        self._nvml, self._uuid = nvml, f"GPU-{getattr(torch.cuda.get_device_properties(index), 'uuid', '')}"
        self._before = before.get(self._uuid)
        self._driver_bytes = -1
        # The context may have been there already when the driver was asked first.
        self.beside_bytes = max(self.taken_bytes(), CONTEXT_BYTES) + CODE_BYTES
        self.memory_bytes = min(memory_bytes or total, total)
        self.faults = Faults()
        self.clock = WallClock()
        self._ledger = Ledger(self.memory_bytes, self.faults)
        self._streams: dict[str, CudaStream] = {}
        self._pools: list[ArenaPool] = []
        self._pinned: list[int] = []
        self._origin, self._origin_s = torch.cuda.Event(enable_timing=True), 0.0
        self.compute = self._streams["compute"] = CudaStream(
            "compute", self, torch.cuda.default_stream(self.torch_device)
        )
        _lift_memory_lock()
        self.machine = self._measure(total)
        if link_bw:
            self._play(link_bw)
        weakref.finalize(self, _close_pools, self._pools)

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            # Who waits for a played link must not queue behind the products that wait for him.
            urgent = -1 if self.slow_link is not None else 0
            stream = torch.cuda.Stream(self.torch_device, priority=urgent)
            self._streams[name] = CudaStream(name, self, stream)
        return self._streams[name]

    def event(self, stream: torch.cuda.Stream) -> CudaEvent:
        """An event recorded on `stream`; milliseconds in float32 stay exact near their origin."""
        if time.perf_counter() - self._origin_s > 10:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(self.compute.stream)
            self._origin.synchronize()
            self._origin_s = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaEvent(event, self._origin, self._origin_s)

    def pool(self, name: str, unit_bytes: int, num_units: int, *, min_units: int, max_units: int) -> Pool:
        where = (self._driver, self.torch_device)
        pool = ArenaPool(name, unit_bytes, num_units, (min_units, max_units), self._ledger, where)
        self._pools.append(pool)
        return pool

    def free_bytes(self) -> int:
        """What the limit and the card both still allow."""
        free, _ = torch.cuda.mem_get_info(self.index)
        ours = torch.cuda.memory_allocated(self.index)
        reusable = torch.cuda.memory_reserved(self.index) - ours
        left = self._ledger.free_bytes - ours - self.beside_bytes
        return max(0, min(free + reusable - CODE_BYTES, left))

    def taken_bytes(self) -> int:
        """What the driver says that this process takes of the card, 0 if it can't be asked.

        It is what the card's use has grown by since the process came: another program that starts later is
        counted in.
        """
        if self._nvml is None or self._before is None:
            return 0
        return max(0, self._nvml.used_bytes().get(self._uuid, 0) - self._before)

    def over_bytes(self) -> int:
        """What code and contexts take is learnt when this is first asked, once all kernels have run: later
        the driver's figure may be other programs', so it counts as far as ours have grown."""
        taken = self.taken_bytes()
        own = sum(self._ledger.mapped.values()) + torch.cuda.memory_reserved(self.index)
        if self._driver_bytes < 0:
            self._driver_bytes = max(0, taken - own)
        return max(0, min(taken, own + self._driver_bytes + LATER_BYTES) - self.memory_bytes)

    def pin(self, buffer: Tensor) -> int:
        """Lock host memory in place; returns its device address, 0 if the system refuses."""
        if not buffer.numel():
            return 0
        address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        try:
            there = self._driver.register(address, size)
        except (DeviceError, CapacityError) as error:
            _log.warning(
                "%s of host memory could not be locked (%s); the GPU can't read it, and copies of it wait",
                format_bytes(size),
                error.message,
            )
            return 0
        self._pinned.append(address)
        return there

    def unpin(self, buffer: Tensor) -> None:
        address = buffer.data_ptr()
        if address in self._pinned:
            self._pinned.remove(address)
            self._driver.unregister(address)

    def enter(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def bucket(self, rows: int) -> int:
        return 1 << max(0, rows - 1).bit_length()

    def drops_this_wait(self) -> bool:
        if self.faults.drop_wait:
            self.faults.drop_wait -= 1
            return not self.faults.drop_wait
        return False

    def pace(self, dst: Tensor, src: Tensor) -> None:
        """A copy was just given to the current stream: it takes as long as over the link that is played."""
        if self.slow_link is not None and self.behind_copy is not None and dst.is_cuda and not src.is_cuda:
            self.behind_copy(self.slow_link, src.numel() * src.element_size())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        for pool in self._pools:
            pool.close()
        self._pools.clear()
        for address in self._pinned:
            self._driver.unregister(address)
        self._pinned.clear()

    def _measure(self, total: int) -> Machine:
        """What this card and its link do; the host's rates come from the stored profile if there is one."""
        measured = profile.load()
        host_bw, link_bw = measured.host_bw if measured else 40e9, self._link_rate()
        # What both reach at once is learnt while serving; this is where it starts.
        beside = measured.host_bw_beside_link if measured else 0.0
        props = torch.cuda.get_device_properties(self.index)
        major = (self.capability[0], 0)
        return Machine(
            name=props.name,
            host_bw=host_bw,
            link_bw=link_bw,
            gpu_bw=_BANDWIDTH.get(major, 0.6e12),
            gpu_flops=_FLOPS.get(major, 100e12),
            gpu_memory=total,
            host_memory=0,
            dram_bw=link_bw + (beside or host_bw - 0.2 * link_bw),
            approximate=("gpu_bw", "gpu_flops", *(() if measured else ("host_bw",))),
        )

    def _play(self, link_bw: float) -> None:
        """Be a machine with a slower link: its rate is what everybody plans with."""
        real = self.machine.link_bw
        if link_bw >= real:
            raise ConfigError(
                f"A link of {link_bw / GB:.1f} GB/s can't be played: this one gives {real / GB:.1f}.",
                code="invalid_option",
                hint="Name a lower rate, or leave --sim-link-bw out.",
                param="sim_link_bw",
            )
        _log.warning("a link of %.1f GB/s is played, the real one gives %.1f", link_bw / GB, real / GB)
        self.slow_link = torch.tensor(slow_link(link_bw, real), device=self.torch_device)
        self.machine = self.machine.with_rates(link_bw=link_bw)

    def _link_rate(self) -> float:
        """Bytes per second of a pinned copy to the device: the best of a few."""
        host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=self.torch_device)
        best = float("inf")
        for _ in range(4):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            there.copy_(host, non_blocking=True)
            b.record()
            b.synchronize()
            best = min(best, a.elapsed_time(b) * 1e-3)
        return PROBE_BYTES / best


def _grow_in_place() -> None:
    """Let torch's memory grow where it lies: blocks of fixed sizes leave gaps (measured: 0.5 of 8 GiB)."""
    if not env.names_an_allocator():
        # Too late where this process has taken memory already; a torch without the call leaves gaps.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _lift_memory_lock() -> None:
    """Let this process lock as much memory as the system allows it to."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def _close_pools(pools: list[ArenaPool]) -> None:
    for pool in pools:
        pool.close()


def describe_cards() -> list[str]:
    """One line for each card: index, name, and why it can't be used if so."""
    lines = []
    for i in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(i)
        old = (props.major, props.minor) < FLOOR
        note = f"too old: compute capability {props.major}.{props.minor}, at least {FLOOR[0]}.{FLOOR[1]}"
        lines.append(f"{i}: {props.name}" + (f" ({note})" if old else ""))
    return lines


def find_card(wanted: str) -> int:
    """Index of the card that `wanted` names: an index, a UUID, part of its name; "" = the first usable."""
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    usable = [i for i, card in enumerate(cards) if (card.major, card.minor) >= FLOOR]
    if not wanted and usable:
        return usable[0]
    for i in usable:
        names = (str(i), str(getattr(cards[i], "uuid", "")), f"GPU-{getattr(cards[i], 'uuid', '')}")
        if wanted in names or (not wanted.isdigit() and wanted.lower() in cards[i].name.lower()):
            return i
    raise ConfigError(
        f"No usable GPU matches {wanted!r}." if wanted else "No GPU here can be used.",
        code="no_gpu",
        hint="There are: " + ("; ".join(describe_cards()) or "none") + ".",
        param="gpu",
    )


def usable() -> bool:
    """Whether there is a driver, PyTorch's CUDA build and a card that is not too old. Never raises."""
    if open_driver() is None or not torch.cuda.is_available():
        return False
    cards = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return any(capability >= FLOOR for capability in cards)


def create(options: Options) -> Device:
    if open_driver() is None or not torch.cuda.is_available():
        return CudaDevice()  # says what is missing
    link_bw = (options.sim_link_bw or 0.0) * GB
    return CudaDevice(find_card(options.gpu or ""), options.gpu_memory or 0, link_bw)
