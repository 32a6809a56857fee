"""The link between host memory and a device: alone, and while the CPU reads the same memory.

What the split needs is what both reach together, for a link and cores that share one memory slow each
other down only once that memory is saturated. The source is locked memory of the bank that the CPU reads.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from freetoken.bench import _native
from freetoken.core.interfaces import Device, Event

PIECE = 64 << 20
DEPTH = 4
"""Pieces under way, so that the link never waits for Python."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second."""

    link: float
    link_beside_host: float
    host_beside_link: float


class Link:
    """Copies piece after piece of a buffer to the device; every piece is larger than any cache's share."""

    def __init__(self, device: Device, made: _native.Experts) -> None:
        self._source = made.bank.buffer[: made.bank.buffer.numel() // PIECE * PIECE]
        assert len(self._source), "a smaller buffer than one piece"
        self.locked = bool(device.pin(self._source))
        self._target = torch.empty(PIECE, dtype=torch.uint8, device=device.torch_device)
        self._device, self._stream = device, device.stream("bench")
        self._at = 0

    def run(self, seconds: float, stop: threading.Event | None = None) -> float:
        """Bytes per second over about `seconds`, or until `stop` is set."""
        under_way: list[Event] = []
        began, count = time.perf_counter(), 0
        while not stop.is_set() if stop else time.perf_counter() - began < seconds:
            self._stream.copy(self._target, self._source[self._at : self._at + PIECE])
            self._at = (self._at + PIECE) % len(self._source)
            under_way.append(self._stream.record())
            if len(under_way) > DEPTH:
                under_way.pop(0).time_s()
            count += 1
        for event in under_way:
            event.time_s()
        return count * PIECE / max(time.perf_counter() - began, 1e-9)


def measure(device: Device, made: _native.Experts, seconds: float) -> tuple[Rates, bool]:
    """The rates, and whether the system locked the memory (copies of pageable memory are slower)."""
    link, read = Link(device, made), _native.Reader(made)
    link.run(0.1)
    alone = link.run(seconds)
    stop, found = threading.Event(), [0.0]

    def copies() -> None:
        device.enter()
        found[0] = link.run(0.0, stop)

    beside = threading.Thread(target=copies, name="link")
    beside.start()
    try:
        time.sleep(0.05)
        host = read.bytes / _native.window(read, seconds)
    finally:
        stop.set()
        beside.join()
    return Rates(alone, found[0], host), link.locked
