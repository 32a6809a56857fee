"""Saved recurrent states: where their bytes lie, whom they serve, which goes first.

Owns units of the device's state pool and slots in host memory. A state is written into a unit, goes to a
slot (`stow`) and keeps the unit as a copy until another state or a request needs it: `working` units are
its own, beyond them it borrows what requests leave free. Knows no request and no bytes; `UnitMover`
carries orders out. Invariants: a unit or slot has one owner, and a state is restored from a place only
while that place is its own; slots stay within `num_slots`.

What goes first is decided by GreedyDual: a checkpoint is worth the level at its last use plus the tokens
that would be computed again without it. Conversations (`group`) in use keep their fair share from others.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from freetoken.cache.nodes import Node, Resource
from freetoken.cache.pages import UnitAllocator
from freetoken.core.prefix import Checkpoint, UnitMover

Worth = tuple[float, int]
KEEP_FREE = 4
"""Units that stay free for requests that arrive, beyond the working set."""
RECENT_GROUPS = 16
"""Conversations that share protection: more than an agent and its helpers, fewer than a day's."""


class _Marks:
    """A node's checkpoints by position, and the level at the node's last use."""

    __slots__ = ("at", "level")

    def __init__(self) -> None:
        self.at: dict[int, Checkpoint] = {}
        self.level = 0.0


class Checkpoints(Resource):
    """The resource of recurrent states. units: the state pool's allocator, shared with the requests."""

    def __init__(self, units: UnitAllocator, working: int, num_slots: int, mover: UnitMover) -> None:
        self.units, self.working, self._mover = units, working, mover
        self.slots = UnitAllocator("checkpoints", num_slots + 1)
        self.on_change: Callable[[Node], None] = lambda node: None
        self.on_drop: Callable[[Checkpoint], None] = lambda checkpoint: None
        self.num_saved = self.num_missed = self.num_evicted = 0
        self.num_restored = self.num_from_host = 0
        self.num_attached = 0
        self._unit_of: OrderedDict[int, Checkpoint] = OrderedDict()
        self._slot_of: dict[int, Checkpoint] = {}
        self._heap: list[tuple[Worth, int, Checkpoint]] = []
        self._pushes = 0
        self._level = 0.0
        self._held: Counter[str] = Counter()
        self._recent: OrderedDict[str, None] = OrderedDict()

    @property
    def num_units(self) -> int:
        """Units of the state pool that checkpoints own."""
        return len(self._unit_of)

    def snapshot(self) -> dict[str, int]:
        return {
            "checkpoints": self.num_attached,
            "checkpoints_on_device": len(self._unit_of),
            "checkpoints_in_host_memory": len(self._slot_of),
            "checkpoints_saved": self.num_saved,
            "checkpoints_missed": self.num_missed,
            "checkpoints_evicted": self.num_evicted,
            "restores": self.num_restored,
            "restores_from_host": self.num_from_host,
        }

    # --- the tree's side ---

    def empty(self) -> Any:
        return _Marks()

    def marks(self, node: Node) -> dict[int, Checkpoint]:
        marks: _Marks = node.held[self.index]
        return marks.at

    def touch(self, node: Node) -> None:
        node.held[self.index].level = self._level

    def split(self, upper: Node, lower: Node) -> None:
        upper.held[self.index].level = lower.held[self.index].level
        theirs, ours = self.marks(upper), self.marks(lower)
        for position in [p for p in ours if p <= lower.start]:
            theirs[position] = ours.pop(position)
            theirs[position].place = upper

    def cut(self, node: Node, end: int) -> None:
        marks = self.marks(node)
        for position in [p for p in marks if p > end]:
            self._free(marks.pop(position))

    def resume_at(self, node: Node, limit: int) -> int:
        fitting = (p for p, c in self.marks(node).items() if p <= limit and self.is_intact(c))
        return max(fitting, default=-1)

    def attach(self, node: Node, checkpoint: Checkpoint) -> None:
        """Hang a checkpoint on the node that holds its position; a second one there is dropped."""
        marks = self.marks(node)
        if checkpoint.position in marks or not self.is_intact(checkpoint):
            self._free(checkpoint)
            return
        marks[checkpoint.position] = checkpoint
        checkpoint.place = node
        checkpoint.level = self._level
        self.num_attached += 1
        self.stow(checkpoint)
        self._push(checkpoint)

    # --- saving ---

    def num_reservable(self) -> int:
        free = min(self.working - len(self._unit_of), self.units.num_free)
        free = max(free, self.units.num_free - KEEP_FREE if self.working else 0, 0)
        return free + sum(self._is_spare(c) for c in self._unit_of.values())

    def reserve(self, position: int, group: str) -> Checkpoint | None:
        """A unit of the working set for a state about to be written."""
        unit = self._take_unit()
        if unit < 0:
            self.num_missed += 1
            return None
        return self._own(position, group, unit)

    def adopt(self, position: int, group: str, unit: int) -> Checkpoint | None:
        """Take over a request's own unit; the pool gets one of the working set back for it."""
        spare = self._take_unit()
        if spare < 0:
            self.num_missed += 1
            return None
        self.units.give_back([spare])
        return self._own(position, group, unit)

    def yield_unit(self, *, wait: bool) -> bool:
        """Give a unit back to the pool: a copy's, or with `wait` one that is being copied."""
        unit = self._take_spare()
        if unit < 0 and wait:
            for checkpoint in self._unit_of.values():
                if checkpoint.slot >= 0:
                    self._mover.wait_saved(checkpoint.unit)
                    unit = self._take_spare()
                    break
        if unit >= 0:
            self.units.give_back([unit])
        return unit >= 0

    def stow(self, checkpoint: Checkpoint) -> None:
        """Start the copy to host memory, if there is room or somebody less valuable to make room."""
        if checkpoint.slot >= 0 or checkpoint.unit < 0 or self.slots.num_units == 1:
            return
        if not self.slots.num_free and not self._evict_for(checkpoint.group):
            return
        self._take_slot(checkpoint)
        self._mover.save_state(checkpoint.unit, checkpoint.slot)

    def _take_slot(self, checkpoint: Checkpoint) -> None:
        checkpoint.slot = self.slots.take(1)[0]
        self._slot_of[checkpoint.slot] = checkpoint
        self._held[checkpoint.group] += 1

    def discard(self, checkpoint: Checkpoint) -> None:
        self._free(checkpoint)

    def revive(self, position: int, group: str) -> Checkpoint | None:
        """A checkpoint in host memory whose bytes will come from elsewhere; None if there is no room."""
        if self.slots.num_units == 1 or not (self.slots.num_free or self._evict_for(group)):
            return None
        checkpoint = Checkpoint(position, group, -1)
        self._take_slot(checkpoint)
        self.use(group)
        return checkpoint

    # --- restoring ---

    def is_intact(self, checkpoint: Checkpoint) -> bool:
        """True while one of its places is really its own."""
        by_unit = self._unit_of.get(checkpoint.unit) is checkpoint
        return by_unit or self._slot_of.get(checkpoint.slot) is checkpoint

    def restore(self, checkpoint: Checkpoint, unit: int) -> None:
        """Copy to a request's unit, from the device if it is still there."""
        self.num_restored += 1
        self.use(checkpoint.group)
        checkpoint.level = self._level
        if self._unit_of.get(checkpoint.unit) is checkpoint:
            self._unit_of.move_to_end(checkpoint.unit)
            self._mover.copy_state(checkpoint.unit, unit)
            return
        assert self._slot_of.get(checkpoint.slot) is checkpoint, "restored from a place of somebody else"
        self.num_from_host += 1
        self._mover.load_state(checkpoint.slot, unit)

    def use(self, group: str) -> None:
        """The group's conversation goes on: its share is protected again."""
        self._recent[group] = None
        self._recent.move_to_end(group)
        if len(self._recent) > RECENT_GROUPS:
            self._recent.popitem(last=False)

    # --- places ---

    def _own(self, position: int, group: str, unit: int) -> Checkpoint:
        checkpoint = Checkpoint(position, group, unit)
        self._unit_of[unit] = checkpoint
        self.num_saved += 1
        self.use(group)
        return checkpoint

    def _is_spare(self, checkpoint: Checkpoint) -> bool:
        """Its unit can be taken: the bytes are in host memory too, or it is a checkpoint without a slot."""
        if checkpoint.slot >= 0:
            return self._mover.is_saved(checkpoint.unit)
        return checkpoint.place is not None

    def _take_unit(self) -> int:
        """A free unit, or that of the copy that was used least recently; -1 if there is none."""
        if not self.working:
            return -1
        if self.units.num_free > (0 if len(self._unit_of) < self.working else KEEP_FREE):
            return self.units.take(1)[0]
        return self._take_spare()

    def _take_spare(self) -> int:
        spare = [c for c in self._unit_of.values() if self._is_spare(c)]
        chosen = next((c for c in spare if c.slot >= 0), spare[0] if spare else None)
        if chosen is None:
            return -1
        unit = chosen.unit
        del self._unit_of[unit]
        chosen.unit = -1
        if chosen.slot < 0:
            self._unhang(chosen)
        return unit

    def _free(self, checkpoint: Checkpoint) -> None:
        """Give both places back. A copy under way only ever writes to the slot of a later owner before
        that owner's own copy, so nothing waits here."""
        if self._unit_of.get(checkpoint.unit) is checkpoint:
            del self._unit_of[checkpoint.unit]
            self.units.give_back([checkpoint.unit])
        if self._slot_of.get(checkpoint.slot) is checkpoint:
            del self._slot_of[checkpoint.slot]
            self.slots.give_back([checkpoint.slot])
            self._held[checkpoint.group] -= 1
            if not self._held[checkpoint.group]:
                del self._held[checkpoint.group]
        self.num_attached -= checkpoint.place is not None
        checkpoint.unit = checkpoint.slot = -1
        checkpoint.place = None

    def _unhang(self, checkpoint: Checkpoint) -> None:
        """Take an attached checkpoint off the tree."""
        node = checkpoint.place
        del self.marks(node)[checkpoint.position]
        self.num_evicted += 1
        self._free(checkpoint)
        self.on_change(node)

    # --- worth ---

    def _evict_for(self, group: str) -> bool:
        """Drop the least valuable checkpoint that `group` may displace."""
        protected: list[tuple[Worth, int, Checkpoint]] = []
        share = self._fair_share()
        victim: Checkpoint | None = None
        while self._heap and victim is None:
            worth, number, checkpoint = heapq.heappop(self._heap)
            if checkpoint.place is None or checkpoint.slot < 0:
                continue
            now = self._worth(checkpoint)
            if now > worth:
                self._push(checkpoint, now)
            elif checkpoint.group != group and self._is_protected(checkpoint.group, share):
                protected.append((worth, number, checkpoint))
            else:
                victim = checkpoint
                self._level = max(self._level, worth[0])
        if victim is None and protected:
            victim = protected.pop(0)[2]
        for item in protected:
            heapq.heappush(self._heap, item)
        if victim is not None:
            self.on_drop(victim)
            self._unhang(victim)
        return victim is not None

    def _fair_share(self) -> float:
        sharing = sum(self._held[group] > 0 for group in self._recent)
        return (self.slots.num_units - 1) / max(sharing, 1)

    def _is_protected(self, group: str, share: float) -> bool:
        return group in self._recent and self._held[group] <= share

    def _worth(self, checkpoint: Checkpoint) -> Worth:
        """Level at the last use of its node plus the tokens it saves; then that use."""
        level = max(checkpoint.level, checkpoint.place.held[self.index].level)
        return level + checkpoint.position - self._previous(checkpoint), checkpoint.place.seen

    def _previous(self, checkpoint: Checkpoint) -> int:
        """Where a request would resume without it."""
        node: Node | None = checkpoint.place
        while node is not None:
            before = max((p for p in self.marks(node) if p < checkpoint.position), default=0)
            if before:
                return before
            node = node.parent
        return 0

    def _push(self, checkpoint: Checkpoint, worth: Worth | None = None) -> None:
        self._pushes += 1
        worth = self._worth(checkpoint) if worth is None else worth
        heapq.heappush(self._heap, (worth, self._pushes, checkpoint))
        if len(self._heap) > 4 * self.num_attached + 64:
            self._heap = [item for item in self._heap if item[2].place is not None]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError when a place is lost or has two owners."""
        self.slots.check()
        assert self.working or not self._unit_of, "no working set, but units are held"
        assert self.slots.num_used == len(self._slot_of), "a slot is lost"
        for unit, checkpoint in self._unit_of.items():
            assert checkpoint.unit == unit, "a unit has two owners"
        for slot, checkpoint in self._slot_of.items():
            assert checkpoint.slot == slot, "a slot has two owners"
