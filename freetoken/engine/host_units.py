"""Equal units of host memory that a device copies to and from at the link's speed.

Owns slabs of memory, each locked once (`Device.pin`) and kept until `close`, and which units of them are
free; knows no page, state or name. Locking takes tens of milliseconds a slab, so a thread makes them ahead of
need; it ends when enough lie ready. A system that refuses to lock leaves slabs pageable: slower, as correct.
Invariants: slabs never take more than `max_bytes`, ready ones included; a unit has one owner; units are given
out in the order in which they came back, so what was copied last to a free one is most likely over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.interfaces import Device, Event
from freetoken.core.log import logger
from freetoken.core.units import GIB, MIB, format_bytes
from freetoken.native.library import library

log = logger("cold")
SLAB_BYTES = 64 * MIB
AHEAD_BYTES = GIB
"""Made before anybody asks, or a quarter of the limit: a prompt of 16k tokens evicts about 650 MB at once."""
LEAST_SLABS = 16
_ALIGNMENT = 4096


class Batch:
    """Copies that are started together. `event` follows the last of them; None: not started yet."""

    event: Event | None = None

    def done(self) -> bool:
        """True once all bytes are where they belong. Never blocks."""
        return self.event is not None and self.event.done()


@dataclass(frozen=True)
class _Slab:
    """rows: uint8 [units, unit_bytes], from `start` of memory that begins at a page of the system."""

    rows: Tensor
    is_locked: bool


class HostUnits:
    """Units of `unit_bytes` numbered from 0, taken by one thread; at most `max_bytes` in all."""

    def __init__(self, device: Device, unit_bytes: int, max_bytes: int) -> None:
        self._device, self.unit_bytes = device, unit_bytes
        wanted = min(SLAB_BYTES, max_bytes // LEAST_SLABS) // max(unit_bytes, 1)
        self._per_slab = max(wanted, 1)
        self._slab_bytes = self._per_slab * unit_bytes
        self._max_slabs = max_bytes // self._slab_bytes if unit_bytes else 0
        # Where nothing needs locking there is nothing to do ahead.
        ahead = min(AHEAD_BYTES, max_bytes // 4) if device.locks_memory else 0
        self._ahead = min(-(-ahead // self._slab_bytes), self._max_slabs) if unit_bytes else 0
        self._slabs: list[_Slab] = []
        self._free: deque[tuple[int, Batch | None]] = deque()
        self.num_used = 0
        self._lock = threading.Lock()
        self._ready: list[_Slab] = []
        self._num_made = 0
        self._refused = self._closed = False
        self._maker: threading.Thread | None = None
        self._refill()

    @property
    def capacity(self) -> int:
        """Units that there may be."""
        return self._max_slabs * self._per_slab

    @property
    def slab_bytes(self) -> int:
        """Host memory taken, by units in use and free and by slabs that lie ready."""
        return self._num_made * self._slab_bytes

    @property
    def locked_bytes(self) -> int:
        with self._lock:
            slabs = [*self._slabs, *self._ready]
        return sum(slab.is_locked for slab in slabs) * self._slab_bytes

    def take(self, count: int) -> list[tuple[int, Batch | None]] | None:
        """Units with the last copy that touched each; None, and none taken, if there are not so many."""
        while len(self._free) < count:
            if len(self._slabs) >= self._max_slabs or not self._add_slab():
                return None
        self.num_used += count
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, units: Iterable[int], last: Batch | None) -> None:
        """`last`: the copy that may still be at work on them."""
        before = len(self._free)
        self._free.extend((unit, last) for unit in units)
        self.num_used -= len(self._free) - before

    def follows(self, unit: int, before: int) -> bool:
        """True if `unit` lies right behind `before` in memory."""
        return unit == before + 1 and unit % self._per_slab != 0

    def rows(self, first: int, count: int) -> Tensor:
        """uint8 [count, unit_bytes]: units of one slab."""
        slab, at = divmod(first, self._per_slab)
        return self._slabs[slab].rows[at : at + count]

    def pieces(self, units: Sequence[int], num_bytes: int) -> list[Tensor]:
        """The first `num_bytes` of units in their order, as few flat tensors as they lie in."""
        out: list[Tensor] = []
        first = 0
        for i in range(1, len(units) + 1):
            if i == len(units) or not self.follows(units[i], units[i - 1]):
                flat = self.rows(units[first], i - first).flatten()
                out.append(flat[: num_bytes - first * self.unit_bytes])
                first = i
        return out

    def close(self) -> None:
        """Unlock and free all memory; the caller has seen to it that no copy is at work. Idempotent."""
        with self._lock:
            self._closed, maker = True, self._maker
        if maker is not None:
            maker.join()
        for slab in (*self._slabs, *self._ready):
            if slab.is_locked:
                self._device.unpin(slab.rows)
        self._slabs.clear()
        self._ready.clear()
        self._free.clear()
        self._max_slabs = self._num_made = self.num_used = 0

    # --- slabs ---

    def _add_slab(self) -> bool:
        """Put one more slab to use: a ready one, else one made now; False at the limit."""
        with self._lock:
            slab, maker = self._ready.pop() if self._ready else None, self._maker
        if slab is None and self._reserve():
            slab = self._make()
        elif slab is None and maker is not None:
            # The last that the limit allows is on its way.
            maker.join()
            with self._lock:
                slab = self._ready.pop() if self._ready else None
        if slab is None:
            return False
        first = len(self._slabs) * self._per_slab
        with self._lock:
            self._slabs.append(slab)
        self._free.extend((unit, None) for unit in range(first, first + self._per_slab))
        self._refill()
        return True

    def _refill(self) -> None:
        """Let a thread make slabs until enough lie ready."""
        with self._lock:
            full = len(self._ready) >= self._ahead or self._num_made >= self._max_slabs
            if full or self._maker is not None or self._closed:
                return
            self._maker = threading.Thread(target=self._fill, name="freetoken-cold-memory", daemon=True)
            self._maker.start()

    def _fill(self) -> None:
        self._device.enter()
        while True:
            with self._lock:
                if self._closed or len(self._ready) >= self._ahead or self._num_made >= self._max_slabs:
                    self._maker = None
                    return
                self._num_made += 1
            slab = self._make()
            if slab is not None:
                with self._lock:
                    self._ready.append(slab)

    def _reserve(self) -> bool:
        with self._lock:
            if self._num_made >= self._max_slabs:
                return False
            self._num_made += 1
            return True

    def _make(self) -> _Slab | None:
        """One slab of those that `_num_made` counts already; None, and the limit falls, without memory."""
        try:
            raw = torch.empty(self._slab_bytes + _ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:
            with self._lock:
                self._num_made -= 1
                self._max_slabs = self._num_made
            log.warning("no more host memory for prefixes than %s: %s", format_bytes(self.slab_bytes), error)
            return None
        memory = raw[-raw.data_ptr() % _ALIGNMENT :][: self._slab_bytes]
        return _Slab(memory.view(self._per_slab, self.unit_bytes), self._pin(memory))

    def _pin(self, memory: Tensor) -> bool:
        """Lock it. The first refusal is the last try: others need what the system still gives."""
        if self._refused or not self._device.locks_memory:
            return False
        lib = library()
        if lib is not None:  # which takes longer than locking, and other threads may run
            lib.populate(memory.data_ptr(), memory.numel())
        if self._device.pin(memory):
            return True
        with self._lock:
            is_first, self._refused = not self._refused, True
        if is_first:  # both threads may have asked at once
            log.warning(
                "host memory for prefixes can't be locked beyond %s; copies of pages will hold up steps",
                format_bytes(self.locked_bytes),
            )
        return False
