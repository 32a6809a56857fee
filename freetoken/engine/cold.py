"""What left the device, kept in host memory and then on disk: pages and states by their names.

Owns the bytes in host memory (units as large as a page, a state takes several), their limit and the order in
which they leave: least recently used, to the disk if there is one. Knows no tree and no request. Order: what
is put and loaded is one batch until `carry_out`, which starts its copies on the stream of states: they wait
for all that `compute` has been given, and what `compute` does next waits for them. A unit goes to its next
owner only when the batch that touched it last is ordered before: by the stream, or by its end where the host
itself writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from freetoken.core.interfaces import Device, Pool
from freetoken.core.prefix import ColdStore
from freetoken.engine.disk import DiskTier
from freetoken.engine.host_units import Batch, HostUnits
from freetoken.engine.states import StateMover

PAGE, STATE = "page", "state"


@dataclass(slots=True)
class _Entry:
    """num_bytes in `units`. `last`: the copy that touched them last; None: the host wrote them."""

    units: list[int]
    num_bytes: int
    last: Batch | None


@dataclass(slots=True)
class _Run:
    """Neighbours on both sides: `count` units from `unit` on and pages from `page` on."""

    unit: int
    page: int
    loads: bool
    count: int = 1


class ColdTier(ColdStore):
    """states: where they lie in host memory; max_bytes: of this tier's own; disk: or None."""

    def __init__(
        self, device: Device, kv: Pool, states: StateMover, max_bytes: int, disk: DiskTier | None
    ) -> None:
        self._device, self._kv, self._states = device, kv, states
        self._disk = disk
        self._units = HostUnits(device, kv.unit_bytes, max_bytes)
        self._sizes = {PAGE: kv.unit_bytes, STATE: states.host.shape[1]}
        self._counts = {kind: -(-size // kv.unit_bytes) for kind, size in self._sizes.items()}
        self._stream = device.stream("states")
        self._held: OrderedDict[str, _Entry] = OrderedDict()
        self._batch = Batch()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._run: _Run | None = None
        self._rests: dict[bytes, set[bytes]] = {}
        self.saved_bytes = self.loaded_bytes = self.num_batches = 0
        for name in disk.names() if disk else ():
            self._note(name)

    def has_page(self, key: bytes, rest: bytes) -> bool:
        return self._has(_name(PAGE, key, rest), PAGE)

    def rests(self, key: bytes) -> Collection[bytes]:
        return self._rests.get(key, ())

    def put_page(self, key: bytes, rest: bytes, page: int) -> None:
        entry = self._put(_name(PAGE, key, rest), PAGE)
        if entry is not None:
            self._add_page(entry.units[0], page, loads=False)

    def put_state(self, key: bytes, rest: bytes, slot: int) -> None:
        name = _name(STATE, key, rest)
        entry = self._put(name, STATE)
        if entry is not None:
            self._add_state(entry, slot, loads=False)
            self._note(name)

    def load_page(self, key: bytes, rest: bytes, page: int) -> bool:
        entry = self._load(_name(PAGE, key, rest), PAGE)
        if entry is not None:
            self._add_page(entry.units[0], page, loads=True)
        return entry is not None

    def load_state(self, key: bytes, rest: bytes, slot: int) -> bool:
        entry = self._load(_name(STATE, key, rest), STATE)
        if entry is not None:
            self._add_state(entry, slot, loads=True)
        return entry is not None

    def discard(self, key: bytes, rest: bytes) -> None:
        for kind in (PAGE, STATE):
            name = _name(kind, key, rest)
            if (entry := self._held.pop(name, None)) is not None:
                self._units.give_back(entry.units, entry.last)
            if self._disk is not None:
                self._disk.discard(name)
            self._forget(name)

    def carry_out(self) -> None:
        self._end_run()
        if not self._pairs:
            return
        pairs, self._pairs = self._pairs, []
        batch, self._batch = self._batch, Batch()
        try:
            self._stream.wait(self._device.compute.record())
            self._stream.copy_all(pairs)
            batch.event = self._stream.record()
            self._device.compute.wait(batch.event)
        except BaseException:
            self._drop(batch)
            raise
        self.num_batches += 1

    @property
    def lasts(self) -> bool:
        return self._disk is not None and self._disk.is_on

    def flush(self) -> None:
        if self._disk is not None:
            self.carry_out()
            self._device.synchronize()
            for name, entry in self._held.items():
                self._disk.write(name, *self._pieces(entry))

    def close(self) -> None:
        """Free the host memory; the device is at rest. Idempotent."""
        self._pairs.clear()
        self._run = None
        self._held.clear()
        self._units.close()

    def snapshot(self) -> dict[str, int]:
        disk, units = self._disk, self._units
        return {
            "cold_bytes": units.num_used * units.unit_bytes,
            "cold_entries": len(self._held),
            "cold_memory_bytes": units.slab_bytes,
            "cold_locked_bytes": units.locked_bytes,
            "cold_saved_bytes": self.saved_bytes,
            "cold_loaded_bytes": self.loaded_bytes,
            "cold_batches": self.num_batches,
            "disk_bytes": disk.num_bytes if disk else 0,
            "disk_written_bytes": disk.num_written if disk else 0,
            "disk_read_bytes": disk.num_read if disk else 0,
            "disk_damaged": disk.num_damaged if disk else 0,
        }

    # --- entries ---

    def _has(self, name: str, kind: str) -> bool:
        if name in self._held:
            return True
        return self._disk is not None and name in self._disk and self._counts[kind] <= self._units.capacity

    def _put(self, name: str, kind: str) -> _Entry | None:
        """A place for what is not kept yet."""
        if name in self._held:
            self._held.move_to_end(name)
            return None
        if self._has(name, kind):
            return None
        # A state is copied by the host where both sides are its memory.
        units = self._take(kind, by_host=kind == STATE)
        if units is None:
            return None
        entry = self._held[name] = _Entry(units, self._sizes[kind], self._batch)
        self.saved_bytes += entry.num_bytes
        return entry

    def _load(self, name: str, kind: str) -> _Entry | None:
        """What is kept, in host memory."""
        entry = self._held.get(name) or self._read(name, kind)
        if entry is None:
            self._forget(name)
            return None
        self._held.move_to_end(name)
        entry.last = self._batch
        self.loaded_bytes += entry.num_bytes
        return entry

    def _read(self, name: str, kind: str) -> _Entry | None:
        """From the disk."""
        if self._disk is None or name not in self._disk:
            return None
        units = self._take(kind, by_host=True)
        if units is None:
            return None
        entry = _Entry(units, self._sizes[kind], None)
        if not self._disk.read(name, *self._pieces(entry)):
            self._units.give_back(units, None)
            return None
        self._held[name] = entry
        return entry

    def _take(self, kind: str, *, by_host: bool) -> list[int] | None:
        """Units for one entry, the least recently used make room; None if all of them are too few."""
        count = self._counts[kind]
        if count > self._units.capacity:
            return None
        while (taken := self._units.take(count)) is None:
            if not self._held:
                return None
            self._leave(*self._held.popitem(last=False))
        asked = None
        for _, last in taken:
            if last is None or last is asked:
                continue
            asked = last
            if last is self._batch:
                self.carry_out()
            if by_host and not last.done():
                self._device.synchronize()
        return [unit for unit, _ in taken]

    def _leave(self, name: str, entry: _Entry) -> None:
        """An entry gives way: to the disk, once its bytes are there."""
        if self._disk is not None and self._disk.is_on:
            if entry.last is self._batch:
                self.carry_out()
            if entry.last is not None and not entry.last.done():
                self._device.synchronize()
            self._disk.write(name, *self._pieces(entry))
        self._units.give_back(entry.units, entry.last)
        self._forget(name)

    def _drop(self, batch: Batch) -> None:
        """Its copies failed: what it touched is not known to be whole."""
        for name in [name for name, entry in self._held.items() if entry.last is batch]:
            self._units.give_back(self._held.pop(name).units, batch)
            self._forget(name)

    def _pieces(self, entry: _Entry) -> list[Tensor]:
        return self._units.pieces(entry.units, entry.num_bytes)

    # --- copies ---

    def _add_page(self, unit: int, page: int, *, loads: bool) -> None:
        """One more copy; neighbours on both sides become one."""
        run = self._run
        if run is not None and run.loads == loads:
            ends = run.page + run.count, run.unit + run.count - 1
            if page == ends[0] and self._units.follows(unit, ends[1]):
                run.count += 1
                return
        self._end_run()
        self._run = _Run(unit, page, loads)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            pages = self._kv.view()[run.page : run.page + run.count]
            units = self._units.rows(run.unit, run.count)
            self._pairs.append((pages, units) if run.loads else (units, pages))

    def _add_state(self, entry: _Entry, slot: int, *, loads: bool) -> None:
        self._end_run()
        state, at = self._states.at_rest(slot), 0
        for piece in self._pieces(entry):
            part = state[at : at + piece.numel()]
            self._pairs.append((part, piece) if loads else (piece, part))
            at += piece.numel()

    # --- which states there are ---

    def _note(self, name: str) -> None:
        kind, key, rest = _parts(name)
        if kind == STATE:
            self._rests.setdefault(key, set()).add(rest)

    def _forget(self, name: str) -> None:
        """The entry has left this store: a state there is none any more."""
        if not name.startswith(STATE):
            return
        _, key, rest = _parts(name)
        if key in self._rests and not self._has(name, STATE):
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
