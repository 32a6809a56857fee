"""Virtual time of the simulated device: an event log with dependencies, and one shared link.

Streams are named queues. `compute` and `host` run kernels: their time advances by what is charged. All
other streams copy over the link, one copy at a time, taken in turn from the streams that are ready, so a
stream never queues behind more than one copy of another. Transfers are scheduled as late as possible
(when somebody asks for a completion), so work that is issued later still gets its fair turn.

Visibility is a vector clock: stream R sees what stream S enqueued up to `R.seen[S]`. A copy's bytes are
poison from the moment it is enqueued until another stream's wait, a successful poll or a synchronise
covers it; a copy into units that a kernel may still be reading (no wait covers the read) stays poison.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from freetoken.core.machine import Machine

FOREVER = float("inf")


@dataclass(eq=False)
class Transfer:
    """One copy over the link. `end_s` is None until the link has been simulated that far."""

    stream: int
    num_bytes: int
    ready_s: float
    extra_s: float
    start_s: float = 0.0
    end_s: float | None = None


@dataclass(eq=False)
class Delivery:
    """Bytes on their way. `broken`: the copy was not ordered after the last reader of its target."""

    seq: int
    dst: Tensor
    src: Tensor
    broken: bool = False
    zeros: bool = False


@dataclass
class Rates:
    """The machine's rates, replaced while running; `jitter` stretches copies at random by up to its share."""

    machine: Machine
    jitter: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))


class Link:
    """Host to device, one copy at a time. `busy` keeps recent intervals for the host's contention."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._queues: dict[int, deque[Transfer]] = {}
        self._ends: dict[int, float] = {}
        self._served: dict[int, int] = {}
        self._turn = 0
        self._free_s = 0.0
        self.busy: deque[tuple[float, float]] = deque(maxlen=4096)
        self.moved_bytes = 0

    def enqueue(self, transfer: Transfer) -> None:
        self._queues.setdefault(transfer.stream, deque()).append(transfer)

    def run_until(self, transfer: Transfer) -> float:
        """Simulate until `transfer` has ended; returns its end (s)."""
        while transfer.end_s is None:
            self._step()
        return transfer.end_s

    def advance(self, to_s: float) -> None:
        """Simulate every copy that starts before `to_s`."""
        while True:
            heads = self._heads()
            if not heads or max(self._free_s, min(r for r, _ in heads)) >= to_s:
                return
            self._step()

    def drain(self) -> float:
        """Simulate everything enqueued; returns when the link falls idle."""
        while self._heads():
            self._step()
        return self._free_s

    def _heads(self) -> list[tuple[float, Transfer]]:
        return [(max(q[0].ready_s, self._ends.get(s, 0.0)), q[0]) for s, q in self._queues.items() if q]

    def _step(self) -> None:
        heads = self._heads()
        start = max(self._free_s, min(ready for ready, _ in heads))
        waiting = [t for ready, t in heads if ready <= start]
        draw = self._rates.draw.random() if self._rates.jitter else 0.0
        if self._rates.jitter and draw < 0.5:
            chosen = self._rates.draw.choice(waiting)
        else:
            chosen = min(waiting, key=lambda t: self._served.get(t.stream, -1))
        machine = self._rates.machine
        bandwidth = min(machine.link_bw, machine.dram_bw or machine.link_bw)
        took = chosen.num_bytes / bandwidth * (1.0 + self._rates.jitter * draw) + chosen.extra_s
        chosen.start_s, chosen.end_s = start, start + took
        self._queues[chosen.stream].popleft()
        self._ends[chosen.stream] = self._free_s = chosen.end_s
        self._turn += 1
        self._served[chosen.stream] = self._turn
        self.moved_bytes += chosen.num_bytes
        if self.busy and self.busy[-1][1] >= start:
            self.busy[-1] = (self.busy[-1][0], chosen.end_s)
        else:
            self.busy.append((start, chosen.end_s))

    def host_read(self, start_s: float, num_bytes: float) -> float:
        """When the CPU, starting at `start_s`, has read `num_bytes` beside what the link does (s)."""
        machine = self._rates.machine
        fast, slow = machine.host_bw, machine.host_bw_beside_link
        if slow >= fast:
            return start_s + num_bytes / fast
        at, left = start_s, num_bytes
        while left > 1e-9:
            self.advance(at + left / fast)
            until, is_busy = self._interval(at)
            rate = slow if is_busy else fast
            piece = min(left, (until - at) * rate)
            if until == FOREVER or piece >= left:
                return at + left / rate
            left -= piece
            at = until
        return at

    def _interval(self, at: float) -> tuple[float, bool]:
        """Until when the link's state at `at` lasts, and whether it is busy."""
        following = FOREVER
        for start, end in reversed(self.busy):
            if start <= at < end:
                return end, True
            if end <= at:
                break
            following = start
        return following, False
