"""Expert slots: which records are resident on the device, how much of each, and who may be evicted.

Owns the slot pool and the control arrays; policy names victims, streams move bytes. Integers and one pool.

    slot_of[L*E]    slot of an expert, -1 = none        expert_of[S+1]   -1 = none; slot 0 is the dummy
    state[S+1]      FREE     nothing
                    FILLING  bytes are on their way (sent > in): never a victim
                    RESIDENT tiles [0, tiles_in) are usable; a victim
                    PINNED   resident and read by the layer-step in flight
                    RING     lent to a prefill
    tiles_in[S+1]   tiles published after their bytes arrived; tiles_sent[S+1] enqueued on the fill stream
    generation[S+1] rises whenever a slot is given to an expert, so that late news of an older one is dropped
    score[S+1]      step of the last use; read_at[S+1] order of the last read, for copies that overwrite

Invariant (`check`): slot_of and expert_of are inverse; in <= sent <= T; FREE and RING slots own no expert.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.core.errors import CapacityError, DeviceError
from freetoken.core.interfaces import Device, Event, Policy
from freetoken.experts.bank import ExpertBank
from freetoken.experts.rows import Ints

FREE, FILLING, RESIDENT, PINNED, RING = range(5)
MIN_SLOTS = 6
VERIFY_EVERY = 64

Words = NDArray[np.int32]


@dataclass(frozen=True)
class InFlight:
    """Tiles [.., last) of an expert are in once `event` is done."""

    event: Event
    expert: int
    generation: int
    last: int


class ExpertSlots:
    """`num_slots` usable slots. Expert ids are global; `rest` holds experts whose tail still has to come."""

    def __init__(
        self, bank: ExpertBank, device: Device, policy: Policy, num_slots: int, max_slots: int = 0
    ) -> None:
        total = bank.num_layers * bank.num_experts
        most = max(min(max_slots or total, total), MIN_SLOTS)
        num_slots = min(num_slots, most)
        if num_slots < MIN_SLOTS:
            raise CapacityError(
                f"{num_slots} expert slots are too few; at least {MIN_SLOTS} are needed.",
                code="too_few_slots",
                hint="Raise --moe-cache-size or use --moe-backend cpu.",
            )
        self.bank, self.device, self.policy = bank, device, policy
        self.pool = device.pool(
            "experts", bank.slot_bytes, num_slots + 1, min_units=MIN_SLOTS + 1, max_units=most + 1
        )
        self.max_slots = most
        self.num_tiles: Words = np.array(
            [bank.layouts[i // bank.num_experts].num_tiles for i in range(total)], np.int32
        )
        self.slot_of: Words = np.full(total, -1, np.int32)
        self.expert_of: Words = np.full(most + 1, -1, np.int32)
        self.state: Words = np.full(most + 1, FREE, np.int32)
        self.tiles_in, self.tiles_sent, self.generation, self.score = (
            np.zeros(most + 1, np.int32) for _ in range(4)
        )
        self.read_at: Ints = np.zeros(most + 1, np.int64)
        self.num_reads = 0
        self.rest: deque[tuple[int, int]] = deque(maxlen=most)
        self.in_flight: deque[InFlight] = deque()
        self.evictions = 0
        self.verify_every = VERIFY_EVERY
        self._published = 0

    @property
    def num_slots(self) -> int:
        return self.pool.num_units - 1

    @property
    def num_resident(self) -> int:
        return int((self.expert_of[: self.num_slots + 1] >= 0).sum())

    def view(self) -> Tensor:
        """uint8 [num_slots + 1, slot_bytes]."""
        return self.pool.view()

    def poll(self) -> None:
        """Publish what has arrived since the last look."""
        while self.in_flight and self.in_flight[0].event.done():
            self._publish(self.in_flight.popleft())

    def lookup(self, experts: Ints, step: int) -> tuple[Ints, Ints]:
        """Return (slot, tiles_in) of each expert, slot 0 where absent; present ones are pinned.

        tiles_in = T is a hit, 0 < tiles_in < T a partial hit, else a miss.
        """
        slots = self.slot_of[experts].astype(np.int64)
        present = slots > 0
        slots = np.where(present, slots, 0)
        held = slots[present]
        self.score[held] = step
        self.state[held[self.state[held] == RESIDENT]] = PINNED
        return slots, np.where(present, self.tiles_in[slots], 0).astype(np.int64)

    def take(self, count: int, step: int) -> list[int]:
        """Give up to `count` slots, free ones first, then the policy's victims, emptied."""
        if count <= 0:
            return []
        states = self.state[1 : self.num_slots + 1]
        free = (np.flatnonzero(states == FREE)[:count] + 1).tolist()
        if len(free) < count:
            slots = np.flatnonzero(states == RESIDENT) + 1
            resident = self.expert_of[slots].astype(np.int64)
            for expert in self.policy.order_victims(resident, count - len(free), step, self._lacks(slots)):
                free.append(self.evict(expert))
        return list(free)

    def _lacks(self, slots: Ints) -> Ints:
        """How much of the record of each slot's owner is not there, in sixteenths."""
        whole = self.num_tiles[self.expert_of[slots]].astype(np.int64)
        return 16 * (whole - self.tiles_in[slots]) // whole

    def evict(self, expert: int) -> int:
        """Empty a resident expert's slot and return it."""
        slot = int(self.slot_of[expert])
        assert self.state[slot] == RESIDENT, "only resident experts may be evicted"
        self._clear(slot)
        self.evictions += 1
        return slot

    def bind(self, slot: int, expert: int, step: int) -> None:
        """Give an empty slot to an expert; nothing of it is in yet."""
        self.slot_of[expert], self.expert_of[slot] = slot, expert
        self.state[slot], self.score[slot] = FILLING, step
        self.tiles_in[slot] = self.tiles_sent[slot] = 0
        self.generation[slot] += 1

    def sent(self, expert: int, last: int) -> None:
        """Tiles up to `last` are on the fill stream."""
        slot = self.slot_of[expert]
        self.tiles_sent[slot], self.state[slot] = last, FILLING

    def expect(self, event: Event, experts: Sequence[int]) -> None:
        """What was sent of these experts is in once `event` is done. Events come in stream order."""
        for expert in experts:
            slot = self.slot_of[expert]
            news = InFlight(event, expert, int(self.generation[slot]), int(self.tiles_sent[slot]))
            self.in_flight.append(news)

    def arrived(self) -> None:
        """`compute` has waited for the newest event of the fill stream: publish everything."""
        while self.in_flight:
            self._publish(self.in_flight.popleft())

    def read(self, slots: Ints, num_bytes: int) -> None:
        """Work just enqueued on `compute` reads the first bytes of these slots."""
        self.num_reads += 1
        self.read_at[slots] = self.num_reads
        self.pool.used(slots, num_bytes)

    def unpin(self) -> None:
        """The layer-step in flight is over: what it read may be evicted again."""
        self.state[self.state == PINNED] = RESIDENT

    def lend(self, count: int, step: int) -> list[int]:
        """Lend up to `count` slots to a prefill ring."""
        slots = self.take(count, step)
        self.state[slots] = RING
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        self.state[[s for s in slots if self.state[s] == RING]] = FREE

    def promote(self, slot: int, expert: int, step: int) -> bool:
        """A ring slot that holds the whole of `expert` becomes its slot. False if it has one already."""
        if self.slot_of[expert] >= 0:
            return False
        self.bind(slot, expert, step)
        self.tiles_in[slot] = self.tiles_sent[slot] = self.num_tiles[expert]
        self.state[slot] = RESIDENT
        return True

    def resize(self, num_slots: int, step: int) -> None:
        """Change the number of slots at a safe point; on CapacityError the old number goes on serving.

        Shrinking evicts the coldest that don't fit and moves live slots of the tail into the holes.
        """
        num_slots = max(MIN_SLOTS, min(num_slots, self.max_slots))
        self.device.synchronize()
        self.poll()
        self.unpin()
        if num_slots < self.num_slots:
            self._compact(num_slots, step)
        if num_slots != self.num_slots:
            self.pool.resize(num_slots + 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        n = self.num_slots
        owned = np.flatnonzero(self.expert_of >= 0)
        assert (self.slot_of[self.expert_of[owned]] == owned).all(), "expert_of and slot_of disagree"
        assert (self.slot_of >= 0).sum() == len(owned), "an expert names a slot that is not its own"
        assert not len(owned) or (owned.min() > 0 and owned.max() <= n), "a slot outside the mapped part"
        assert (self.tiles_in <= self.tiles_sent).all(), "more tiles in than sent"
        assert (self.tiles_sent[owned] <= self.num_tiles[self.expert_of[owned]]).all(), "too many tiles"
        empty = np.isin(self.state, (FREE, RING))
        assert (self.expert_of[empty] == -1).all(), "an empty slot owns an expert"
        assert (self.expert_of[~empty] >= 0).all(), "a busy slot owns no expert"
        settled = np.isin(self.state, (RESIDENT, PINNED))
        assert (self.tiles_in[settled] == self.tiles_sent[settled]).all(), "bytes under way to a settled slot"
        assert (self.state[n + 1 :] == FREE).all(), "an unmapped slot is in use"

    def _publish(self, news: InFlight) -> None:
        slot = int(self.slot_of[news.expert])
        if slot < 0 or self.generation[slot] != news.generation:
            return
        self.tiles_in[slot] = max(self.tiles_in[slot], news.last)
        if self.tiles_in[slot] == self.tiles_sent[slot] and self.state[slot] == FILLING:
            self.state[slot] = RESIDENT
        self._published += 1
        if self.verify_every and self._published % self.verify_every == 1 and not self.bank.phantom:
            self._verify(slot, news)

    def _verify(self, slot: int, news: InFlight) -> None:
        one = self.bank.layouts[news.expert // self.bank.num_experts]
        used = one.tile_range(0, news.last)[1]
        if not torch.equal(self.view()[slot][:used], self.bank.record(news.expert)[:used]):
            raise DeviceError(
                f"Expert {news.expert} arrived damaged on the device.",
                code="corrupt_copy",
                hint="Restart; if it comes again, run `ft doctor` and use --moe-backend cpu.",
            )

    def _clear(self, slot: int) -> None:
        expert = self.expert_of[slot]
        if expert >= 0:
            self.slot_of[expert] = -1
        self.expert_of[slot] = -1
        self.state[slot] = FREE
        self.tiles_in[slot] = self.tiles_sent[slot] = 0

    def _compact(self, num_slots: int, step: int) -> None:
        live = np.flatnonzero(self.state[1 : self.num_slots + 1] != FREE) + 1
        surplus = len(live) - num_slots
        if surplus > 0:
            slots = live[self.state[live] == RESIDENT]
            resident = self.expert_of[slots].astype(np.int64)
            victims = self.policy.order_victims(resident, surplus, step, self._lacks(slots))
            if len(victims) < surplus:
                raise CapacityError(
                    f"{num_slots} slots are fewer than the {len(live) - len(victims)} in use right now.",
                    code="slots_in_use",
                    hint="Resize when the running prefill has ended.",
                )
            for expert in victims:
                self.evict(expert)
        tail = (
            np.flatnonzero(self.state[num_slots + 1 : self.num_slots + 1] != FREE) + num_slots + 1
        ).tolist()
        holes = (np.flatnonzero(self.state[1 : num_slots + 1] == FREE)[: len(tail)] + 1).tolist()
        self.pool.relocate(tail, holes)
        for src, dst in zip(tail, holes, strict=True):
            self._move(src, dst)

    def _move(self, src: int, dst: int) -> None:
        expert = self.expert_of[src]
        self.slot_of[expert] = dst
        for array in (
            self.expert_of,
            self.state,
            self.tiles_in,
            self.tiles_sent,
            self.generation,
            self.score,
        ):
            array[dst] = array[src]
        self.expert_of[src] = -1
        self._clear(src)
