"""A device whose streams run late, and in the order that hurts most where nobody waits.

Streams are queues of copies, waits and kernels of the test; nothing runs until somebody polls or
synchronises. As on a GPU, a copy between two places of host memory is made by the host at once.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch

from freetoken.core.interfaces import Event, Stream
from freetoken.devices.cpu import CpuDevice


class LateEvent(Event):
    def __init__(self, stream: LateStream) -> None:
        self.stream, self.position = stream, stream.given

    @property
    def passed(self) -> bool:
        return self.stream.ran >= self.position

    def done(self) -> bool:
        self.stream.device.run(self.stream.device.draw.randrange(3))
        return self.passed

    def time_s(self) -> float:
        return 0.0


class LateStream(Stream):
    """given, ran: entries so far; an entry is an event to wait for, or work."""

    def __init__(self, name: str, device: LateDevice) -> None:
        self.name, self.device = name, device
        self.queue: deque[LateEvent | Callable[[], object]] = deque()
        self.given = self.ran = self.num_copies = self.num_waits = 0

    def run(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.given += 1

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.num_copies += 1
        if self.device.holds(dst) or self.device.holds(src):
            self.run(lambda: dst.copy_(src))
        else:
            dst.copy_(src)

    def record(self) -> Event:
        return LateEvent(self)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.num_waits += 1
        self.device.num_waits += 1
        if self.device.num_waits != self.device.drop:
            self.queue.append(event)
            self.given += 1

    @property
    def can_run(self) -> bool:
        head = self.queue[0] if self.queue else None
        return head is not None and (not isinstance(head, LateEvent) or head.passed)

    def run_one(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, LateEvent):
            head()
        self.ran += 1


class LateDevice(CpuDevice):
    """first   the stream that runs whenever it can; "" = any
    drop    the k-th wait is ignored
    lock    bytes that the system locks
    pinned  by address, the bytes that are locked, and by whom
    """

    owns_memory, locks_memory, in_host_memory, run_ahead = True, True, False, False

    def __init__(self, first: str = "", seed: int = 0, drop: int = 0, lock: int = 1 << 40) -> None:
        super().__init__(memory_bytes=1 << 30)
        self.first, self.draw, self.lock = first, random.Random(seed), lock
        self.drop, self.num_waits = drop, 0
        self.pinned: dict[int, int] = {}
        self.lockers: list[str] = []
        self._pinning = threading.Lock()

    def stream(self, name: str) -> LateStream:
        return self._streams.setdefault(name, LateStream(name, self))

    def holds(self, tensor: torch.Tensor) -> bool:
        starts = [(pool.view().data_ptr(), pool.max_units * pool.unit_bytes) for pool in self._pools]
        return any(0 <= tensor.data_ptr() - start < size for start, size in starts)

    def run(self, count: int) -> None:
        """At most so many entries of queues."""
        for _ in range(count):
            able = [stream for stream in self._streams.values() if stream.can_run]
            if not able:
                return
            liked = [stream for stream in able if stream.name == self.first]
            (liked or [self.draw.choice(able)])[0].run_one()

    def synchronize(self) -> None:
        self.run(1 << 40)
        assert not any(stream.queue for stream in self._streams.values()), "a wait that can't end"

    def pin(self, buffer: torch.Tensor) -> int:
        self.lockers.append(threading.current_thread().name)
        with self._pinning:
            if sum(self.pinned.values()) + buffer.numel() > self.lock:
                return 0
            self.pinned[buffer.data_ptr()] = buffer.numel()
        return buffer.data_ptr()

    def unpin(self, buffer: torch.Tensor) -> None:
        del self.pinned[buffer.data_ptr()]
