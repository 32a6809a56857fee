"""What left the device, kept in host memory and then on disk: pages and states by their names.

Owns the bytes in host memory, their limit and the order in which they leave: least recently used, to the disk
if there is one. Knows no tree and no request. Order: copies run on the stream of states; what `compute` does
next to the same page waits for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from freetoken.core.interfaces import Device, Event, Pool
from freetoken.core.prefix import ColdStore
from freetoken.engine.disk import DiskTier

PAGE, STATE = "page", "state"


class ColdTier(ColdStore):
    """host: uint8 [slots, bytes], states in host memory; max_bytes: of this tier's own; disk: or None."""

    def __init__(self, device: Device, kv: Pool, host: Tensor, max_bytes: int, disk: DiskTier | None) -> None:
        self._device, self._kv, self._host = device, kv, host
        self._max_bytes, self._disk = max_bytes, disk
        self._stream = device.stream("states")
        self._held: OrderedDict[str, tuple[Tensor, Event | None]] = OrderedDict()
        self._num_bytes = 0
        self._rests: dict[bytes, set[bytes]] = {}
        self.saved_bytes = self.loaded_bytes = 0
        for name in disk.names() if disk else ():
            self._note(name)

    def has_page(self, key: bytes, rest: bytes) -> bool:
        return self._has(_name(PAGE, key, rest))

    def rests(self, key: bytes) -> Collection[bytes]:
        return self._rests.get(key, ())

    def put_page(self, key: bytes, rest: bytes, page: int) -> None:
        self._put(_name(PAGE, key, rest), self._kv.view()[page])

    def put_state(self, key: bytes, rest: bytes, slot: int) -> None:
        self._put(_name(STATE, key, rest), self._host[slot])

    def load_page(self, key: bytes, rest: bytes, page: int) -> bool:
        return self._load(_name(PAGE, key, rest), self._kv.view()[page])

    def load_state(self, key: bytes, rest: bytes, slot: int) -> bool:
        return self._load(_name(STATE, key, rest), self._host[slot])

    def flush(self) -> None:
        if self._disk is not None:
            self._device.synchronize()
            for name, (data, _) in self._held.items():
                self._disk.write(name, data)

    def snapshot(self) -> dict[str, int]:
        disk = self._disk
        return {
            "cold_bytes": self._num_bytes,
            "cold_entries": len(self._held),
            "cold_saved_bytes": self.saved_bytes,
            "cold_loaded_bytes": self.loaded_bytes,
            "disk_bytes": disk.num_bytes if disk else 0,
            "disk_written_bytes": disk.num_written if disk else 0,
            "disk_read_bytes": disk.num_read if disk else 0,
            "disk_damaged": disk.num_damaged if disk else 0,
        }

    def _has(self, name: str) -> bool:
        return name in self._held or (self._disk is not None and name in self._disk)

    def _put(self, name: str, source: Tensor) -> None:
        if name in self._held:
            self._held.move_to_end(name)
            return
        if source.numel() > self._max_bytes or self._has(name):
            return
        self._stream.wait(self._device.compute.record())
        data = torch.empty(source.numel(), dtype=torch.uint8)
        self._stream.copy(data, source)
        event = self._stream.record()
        self._device.compute.wait(event)
        self._keep(name, data, event)
        self.saved_bytes += source.numel()
        self._note(name)

    def _load(self, name: str, target: Tensor) -> bool:
        if name not in self._held:
            data = torch.empty(target.numel(), dtype=torch.uint8)
            if self._disk is None or not self._disk.read(name, data):
                self._forget(name)
                return False
            self._keep(name, data, None)
        self._held.move_to_end(name)
        self._stream.wait(self._device.compute.record())
        self._stream.copy(target, self._held[name][0])
        self._device.compute.wait(self._stream.record())
        self.loaded_bytes += target.numel()
        return True

    def _keep(self, name: str, data: Tensor, event: Event | None) -> None:
        """Hold it; the least recently used make room, and go to the disk once their bytes are there."""
        self._held[name] = (data, event)
        self._num_bytes += data.numel()
        while self._num_bytes > self._max_bytes and len(self._held) > 1:
            old, (bytes_, ready) = self._held.popitem(last=False)
            self._num_bytes -= bytes_.numel()
            if self._disk is not None and self._disk.is_on:
                if ready is not None and not ready.done():
                    self._device.synchronize()
                self._disk.write(old, bytes_)
            self._forget(old)

    def _note(self, name: str) -> None:
        kind, key, rest = _parts(name)
        if kind == STATE:
            self._rests.setdefault(key, set()).add(rest)

    def _forget(self, name: str) -> None:
        """The entry has left this store: a state there is none any more."""
        kind, key, rest = _parts(name)
        if kind == STATE and not self._has(name) and key in self._rests:
            self._rests[key].discard(rest)
            if not self._rests[key]:
                del self._rests[key]


def _name(kind: str, key: bytes, rest: bytes) -> str:
    return f"{kind}-{key.hex()}-{rest.hex()}"


def _parts(name: str) -> tuple[str, bytes, bytes]:
    """Foreign files of the folder have no kind."""
    kind, key, rest = (*name.split("-"), "", "")[:3]
    try:
        return kind, bytes.fromhex(key), bytes.fromhex(rest)
    except ValueError:
        return "", b"", b""
