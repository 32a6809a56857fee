"""How fast bytes can move on this machine at best: host memory, link, device memory, host and link at once.

Owns the probes and the arithmetic of limits: what a step must at least take if all that it moves moved at
these rates and nothing else cost anything. Knows no engine. Rates are bytes per second, 0 = there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from freetoken.bench import _native
from freetoken.core import cost
from freetoken.core.interfaces import Device
from freetoken.core.machine import Machine
from freetoken.core.model_config import ModelConfig
from freetoken.experts.bank import ExpertBank
from freetoken.native.library import library

_PIECE = 64 << 20
_TURNS = 4


@dataclass(frozen=True)
class Rates:
    """host and link alone, both together in sum, the device's own memory."""

    host: float = 0.0
    link: float = 0.0
    together: float = 0.0
    gpu: float = 0.0

    def better(self, other: Rates) -> Rates:
        """Each rate from the probe that saw more."""
        names = [f.name for f in fields(self)]
        return Rates(**{name: max(getattr(self, name), getattr(other, name)) for name in names})


def machine_rates(machine: Machine) -> Rates:
    """A simulated machine's rates, which are true by definition."""
    both = machine.link_bw + machine.host_bw_beside_link
    return Rates(machine.host_bw, machine.link_bw, both, machine.gpu_bw)


def probe(device: Device, bank: ExpertBank | None) -> Rates:
    """Measure with the experts themselves as the memory that is read; the engine must be idle."""
    read, size = _reader(bank)
    host = _best(read, size)
    if not device.kernels:
        return Rates(host=host, together=host)
    place = device.torch_device
    there = torch.empty(_PIECE, dtype=torch.uint8, device=place)
    other = torch.empty_like(there)
    pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=place.type == "cuda")

    def copy() -> None:
        there.copy_(pinned, non_blocking=True)
        device.synchronize()

    def within() -> None:
        for _ in range(16):
            other.copy_(there)
        device.synchronize()

    link, gpu = _best(copy, _PIECE), _best(within, 32 * _PIECE)
    if device.slow_link is not None:
        link = device.machine.link_bw
        return Rates(host, link, host + link, gpu)
    return Rates(host, link, max(_both(read, size, copy), host, link), gpu)


def _reader(bank: ExpertBank | None) -> tuple[Callable[[], object], int]:
    """Reads all of a bank, or a block of its own, with all threads."""
    data = bank.buffer if bank is not None else torch.ones(_PIECE, dtype=torch.uint8)
    size = min(data.numel(), 16 * _PIECE)
    lib = library()
    if lib is None:
        words = data[: size // 8 * 8].view(torch.int64)
        return lambda: int(words.sum()), size
    _native.require_library().ping(1)
    return lambda: lib.read(data.data_ptr(), size), size


def _best(call: Callable[[], object], num_bytes: int) -> float:
    call()
    times = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return num_bytes / min(times)


def _both(read: Callable[[], object], size: int, copy: Callable[[], None]) -> float:
    """Bytes a second of reading while another thread copies over the link."""
    stop, copied = threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            copy()
            copied[0] += _PIECE

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    began, before, passes = time.perf_counter(), copied[0], 0
    while (spent := time.perf_counter() - began) < 0.3:
        read()
        passes += 1
    total = (passes * size + copied[0] - before) / spent
    stop.set()
    thread.join()
    return total


@dataclass(frozen=True)
class Moved:
    """Bytes of one step: read beside routed experts, experts that were resident, experts that were not."""

    dense: float
    resident: float
    missing: float

    def least_s(self, rates: Rates, backend: str, *, owns_memory: bool) -> float:
        """Seconds that a step takes at least."""
        if not owns_memory:
            return (self.dense + self.resident + self.missing) / rates.host
        roads = {"offload": rates.link, "cpu": rates.host, "fused": rates.gpu}
        away = self.missing / roads.get(backend, rates.together)
        return max(away, (self.dense + self.resident) / rates.gpu)


def dense_bytes(config: ModelConfig, context: int, held: int) -> float:
    """Read for each step beside routed experts; `held`: what all such weights take in memory (0: unknown)."""
    total = cost.head(config, 1)[0]
    for layer, spec in enumerate(config.layers):
        total += cost.mixer(config, layer, 1, context)[0]
        total += cost.shared_expert(config, 1)[0] if spec.mlp == "moe" else cost.dense_mlp(config, 1)[0]
    return min(total, held) if held else total
