"""The bytes of the prefix cache: KV pages and recurrent states, on the device and in host memory.

Owns the host memory of checkpoints, locked a little ahead of its use, and the stream on which it is filled
and read; which unit holds what is the cache's. Order: copies within the device run on `compute`; a save waits
for all that `compute` was given, a load for earlier saves on its stream, and `compute` waits for the load.
Whoever lets the host itself read or write a slot asks for `at_rest` first.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.core.interfaces import Device, Event, Pool
from freetoken.core.prefix import UnitMover
from freetoken.engine.locking import LockedAhead, page_rows


class StateMover(UnitMover):
    """num_slots places of one state each in host memory, numbered from 1; taken when first written."""

    def __init__(self, device: Device, kv: Pool, states: Pool | None, num_slots: int) -> None:
        self._device, self._kv, self._states = device, kv, states
        self._stream = device.stream("states")
        self._reading: dict[int, Event] = {}
        self._touching: dict[int, Event] = {}
        unit_bytes = states.unit_bytes if states is not None else 0
        self._host = page_rows(num_slots + 1, unit_bytes)
        self._locked = LockedAhead(device, self._host) if device.locks_memory and num_slots else None

    @property
    def host(self) -> Tensor:
        """uint8 [num_slots + 1, unit_bytes]: states in host memory."""
        return self._host

    def copy_page(self, src: int, dst: int) -> None:
        self._kv.relocate([src], [dst])

    def copy_state(self, src: int, dst: int) -> None:
        assert self._states is not None
        self._states.relocate([src], [dst])

    def save_state(self, unit: int, slot: int) -> None:
        assert self._states is not None
        if self._locked is not None:
            self._locked.reached(slot)
        self._stream.wait(self._device.compute.record())
        self._stream.copy(self._host[slot], self._states.view()[unit])
        self._reading[unit] = self._touching[slot] = self._stream.record()
        self.saved_bytes += self._states.unit_bytes

    def load_state(self, slot: int, unit: int) -> None:
        assert self._states is not None
        self._stream.wait(self._device.compute.record())
        self._stream.copy(self._states.view()[unit], self._host[slot])
        event = self._touching[slot] = self._stream.record()
        self._device.compute.wait(event)
        self.loaded_bytes += self._states.unit_bytes

    def at_rest(self, slot: int) -> Tensor:
        """uint8 [unit_bytes]: a slot that no copy reads or writes any more; waits if one does."""
        event = self._touching.pop(slot, None)
        if event is not None and not event.done():
            self._device.synchronize()
        return self._host[slot]

    def wait_saved(self, unit: int) -> None:
        event = self._reading.pop(unit, None)
        if event is not None:
            self._device.compute.wait(event)

    def is_saved(self, unit: int) -> bool:
        event = self._reading.get(unit)
        if event is not None and event.done():
            del self._reading[unit]
            event = None
        return event is None

    def close(self) -> None:
        if self._locked is not None:
            self._locked.close()
