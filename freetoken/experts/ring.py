"""The prefill ring: slots lent in groups through which a layer's absent experts stream.

One copy stream, one event per group. A group is loaded as soon as its buffer is free, however far the
computation has got, so the link never pauses while anything is left to load. Owns the lent slots and what
is under way; doesn't know rows. Full-layer double buffering is the case of groups as large as a layer.

    buffers   three groups of G slots (one without overlap), G the smallest that hides the copies' fixed
              cost, together at most a quarter of the slots; one spare slot for experts that lost theirs
    pieces    a copy takes the link at most 2 ms, so that decode's fills don't queue behind it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from freetoken.core.interfaces import Device, Event
from freetoken.experts.bank import ExpertBank
from freetoken.experts.slots import ExpertSlots

GROUPS = 3
PIECE_S = 0.002
HIDDEN = 20
LEAST_S = 0.0005


def group_size(bank: ExpertBank, device: Device, num_slots: int) -> int:
    """Experts of a group: its copies take at least half a millisecond and 20 times their fixed cost."""
    machine = device.machine
    least_s = max(HIDDEN * machine.fill_fixed_s, LEAST_S)
    hides = int(least_s * machine.link_bw / bank.slot_bytes) + 1
    fits = (num_slots // 4 - 1) // GROUPS
    return max(1, min(hides, fits, bank.num_experts))


@dataclass
class Load:
    """Experts (global ids, ascending) on their way into slots; usable after `event`."""

    experts: list[int]
    slots: list[int]
    event: Event
    epoch: int
    waited: bool = False


@dataclass
class Ring:
    """`epoch` rises when the buffers change hands: loads of an older one are lost."""

    slots: ExpertSlots
    device: Device
    overlap: bool = True
    wanted_group: int = 0
    epoch: int = 0
    link_bytes: int = 0
    free: deque[list[int]] = field(default_factory=deque)
    spare: list[int] = field(default_factory=list)
    ahead: deque[Load] = field(default_factory=deque)
    ahead_layer: int = -1
    ahead_todo: deque[int] = field(default_factory=deque)
    _lent: list[int] = field(default_factory=list)
    _under_way: int = 0
    _ordered: dict[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self._lent)

    def open(self, step: int) -> None:
        """Borrow the slots; with few of them the ring is narrow, down to the spare alone."""
        bank, slots = self.slots.bank, self.slots
        size = self.wanted_group or group_size(bank, self.device, slots.num_slots)
        groups = GROUPS if self.overlap else 1
        keep = 1 if slots.num_slots < 16 else slots.num_slots // 4
        self.group = max(1, min(size, (slots.num_slots - 1 - keep) // groups))
        self._lent = slots.lend(1 + groups * self.group, step)
        self.spare, rest = self._lent[:1], self._lent[1:]
        self.free = deque(
            rest[i : i + self.group] for i in range(0, len(rest), self.group) if len(rest[i : i + self.group])
        )
        self.epoch += 1

    def close(self) -> None:
        """Give the slots back; what was loaded ahead is lost, and later fills come after its copies."""
        if self._under_way:
            self.device.stream("fill").wait(self.device.stream("ring").record())
            self._under_way = 0
        self.slots.give_back(self._lent)
        self._lent, self.spare = [], []
        self.free.clear()
        self.ahead.clear()
        self.ahead_todo.clear()
        self.ahead_layer = -1
        self.epoch += 1

    def load(self, experts: Sequence[int]) -> Load:
        """Start copying up to a group of `experts` into the next free buffer."""
        slots = self.free.popleft()
        chosen = list(experts[: len(slots)])
        self._copy("ring", chosen, slots)
        self._under_way += 1
        return Load(chosen, slots, self.device.stream("ring").record(), self.epoch)

    def fetch(self, expert: int) -> int:
        """Bring one expert into the spare slot, past what the ring has queued, and wait for it."""
        self._copy("fetch", [expert], self.spare)
        self.device.compute.wait(self.device.stream("fetch").record())
        return self.spare[0]

    def done(self, load: Load, wanted: Collection[int], step: int) -> int:
        """The load was computed: promote what is `wanted`, free its buffer. Returns the promotions."""
        if load.epoch != self.epoch:
            return 0
        self._under_way -= load.waited
        promoted = 0
        for place, expert in enumerate(load.experts):
            if expert not in wanted or self.slots.slot_of[expert] >= 0:
                continue
            other = self.slots.lend(1, step)
            if not other:
                break
            old, new = load.slots[place], other[0]
            self.slots.promote(old, expert, step)
            load.slots[place] = new
            self._lent[self._lent.index(old)] = new
            promoted += 1
        self.free.append(load.slots)
        return promoted

    def _copy(self, name: str, experts: list[int], slots: list[int]) -> None:
        """Copies wait for whatever read these slots last, if their stream hasn't yet."""
        stream, bank = self.device.stream(name), self.slots.bank
        if int(self.slots.read_at[slots].max()) > self._ordered.get(name, 0):
            stream.wait(self.device.compute.record())
            self._ordered[name] = self.slots.num_reads
        view = self.slots.view()
        piece = max(1, int(PIECE_S * self.device.machine.link_bw))
        for expert, slot in zip(experts, slots, strict=False):
            record = bank.record(expert)
            used = bank.layouts[expert // bank.num_experts].used_bytes
            for start in range(0, used, piece):
                end = min(used, start + piece)
                stream.copy(view[slot, start:end], record[start:end])
            self.link_bytes += used
