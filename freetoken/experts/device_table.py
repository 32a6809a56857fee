"""Slots and their table on the device: what kernels decide by, and how the host changes it at safe points.

Owns the slot pool and every tensor of `kernels.expert_step.Table`. The device is the truth while steps
run; the host reads or writes the table only after a synchronisation. Slot 0 is no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from freetoken.core.errors import CapacityError
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import Event
from freetoken.core.log import logger
from freetoken.experts.gpu_support import POLICIES, check_policy, device_record
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.split import BUCKETS, ONE
from freetoken.kernels.expert_step import COUNTERS, Place, Table, fetch_ahead, prepare_victims

MIN_SLOTS = 6
HOST_ONLY = BUCKETS - 1
"""The bucket whose split leaves everything to the host."""
_log = logger("experts")


class SlotTable:
    """everything: a slot for each record, never given away. sees: the device may read the bank."""

    def __init__(self, setup: ExpertSetup, *, everything: bool = False, sees: bool = True) -> None:
        bank, device = setup.bank, setup.device
        self._bank, self._device = bank, device
        total = bank.num_layers * bank.num_experts
        most = total if everything else max(min(setup.max_slots or total, total), MIN_SLOTS)
        count = total if everything else max(min(setup.num_slots, most), MIN_SLOTS)
        least = most if everything else MIN_SLOTS
        self.pool = device.pool(
            "experts", bank.slot_bytes, count + 1, min_units=least + 1, max_units=most + 1
        )
        place, policy = device.torch_device, setup.policy
        self._snapshot = torch.zeros(0)
        self._copied: Event | None = None
        check_policy(policy.name if policy is not None else POLICIES[0])
        name = policy.name if policy is not None else POLICIES[0]

        tiles = [one.num_tiles for one in bank.layouts]
        self.table = Table.empty(tiles, bank.num_experts, most, place, name)
        self.table.usable.fill_(count + 1)
        self.table.victims.masked_fill_(self.table.victims > (0 if everything else count), 0)
        self.places = [self._place(setup, layer, sees=sees) for layer in range(bank.num_layers)]
        if sees and not everything and not bank.phantom:
            self.places = [self._checked(place) for place in self.places]

    def _place(self, setup: ExpertSetup, layer: int, *, sees: bool) -> Place:
        assert setup.config.moe is not None
        bank, one = self._bank, self._bank.layouts[layer]
        records = bank.layer(layer)
        return Place(
            layer=layer,
            num_experts=bank.num_experts,
            records=records,
            address=bank.address(layer, setup.device.pin) if sees else 0,
            slots=self.pool.view(),
            coded=device_record(one, bank.formats[layer]),
            activation=setup.config.moe.activation,
            slow_link=setup.device.slow_link,
        )

    def _checked(self, place: Place) -> Place:
        """The place, or without its address if a record read through it isn't the one that lies there.

        Some drivers map memory that was just locked, and read zeros.
        """
        if not place.address:
            return place
        expert = place.layer % place.num_experts
        first = torch.tensor([place.layer * place.num_experts + expert, 1, 0, place.num_tiles])
        self.table.ahead[0] = first.int().to(self.table.ahead.device)
        place.slots[1].zero_()
        fetch_ahead(self.table, place)
        self.table.ahead[0] = -1
        end = place.tiles_offset + place.num_tiles * place.tile_bytes
        if torch.equal(place.slots[1, :end].cpu(), place.records[expert, :end]):
            return place
        _log.warning("the GPU reads wrong bytes of layer %d's experts; the CPU computes them", place.layer)
        return replace(place, address=0)

    @property
    def num_slots(self) -> int:
        return self.pool.num_units - 1

    def set_splits(self, splits: Sequence[tuple[float, float]]) -> None:
        """alpha and beta of each batch bucket; takes effect with the next layer-step."""
        words = [[max(-ONE, min(ONE, round(alpha * ONE))), round(beta * ONE)] for alpha, beta in splits]
        host = torch.tensor(words, dtype=torch.int32)
        host[HOST_ONLY] = torch.tensor([-ONE, 0])
        host = host.pin_memory() if self._device.torch_device.type == "cuda" else host
        self.table.split.copy_(host, non_blocking=True)

    def set_prefetch(self, tiles: int) -> None:
        """Tiles that may be brought ahead of a layer, from the next layer-step on."""
        self.table.budget.fill_(tiles)

    def load_everything(self) -> None:
        """Give every record its slot and its bytes."""
        table, bank = self.table, self._bank
        for layer in range(bank.num_layers):
            records, first = bank.layer(layer), 1 + layer * bank.num_experts
            self.pool.view()[first : first + bank.num_experts, : records.shape[1]].copy_(records)
            for expert in range(bank.num_experts):
                table.tiles_in[first + expert] = bank.layouts[layer].num_tiles
        total = len(table.slot_of)
        table.slot_of.copy_(torch.arange(1, total + 1, dtype=torch.int32))
        table.expert_of[1:].copy_(torch.arange(total, dtype=torch.int32))

    @property
    def base(self) -> int:
        """Device address of slot 0."""
        return self.places[0].slots_address

    def resident(self) -> list[list[int]]:
        """Per layer and expert: the slot that holds all of it, or 0. Waits for the device."""
        table, experts = self.table, self._bank.num_experts
        slot_of, tiles = table.slot_of.cpu().numpy(), table.tiles_in.cpu().numpy()
        slots = np.maximum(slot_of, 0).reshape(-1, experts)
        whole = np.array([one.num_tiles for one in self._bank.layouts])[:, None]
        complete: list[list[int]] = np.where(tiles[slots] == whole, slots, 0).tolist()
        return complete

    def lend(self, count: int, most: int) -> list[int]:
        """Take the last slots away from residency for a while; the warmest residents stay."""
        if self.pool.min_units == self.pool.max_units:
            return []  # everything is resident
        count = max(2, min(count, most, self.num_slots - MIN_SLOTS))
        left = self.num_slots - count
        self._compact(left)
        self.table.usable.fill_(left + 1)
        prepare_victims(self.table)
        return list(range(left + 1, self.num_slots + 1))

    def give_back(self) -> None:
        """All slots may hold residents again."""
        self.table.usable.fill_(self.num_slots + 1)
        if self.pool.min_units != self.pool.max_units:
            prepare_victims(self.table)

    def count(self, stats: ExpertStats, *, wait: bool = True) -> None:
        """Read the device's counters; without waiting, those of a step or two ago."""
        if wait or self._device.torch_device.type == "cpu":
            values = self.table.stats.tolist()
        else:
            if self._copied is None:
                self._snapshot = torch.zeros(COUNTERS, dtype=torch.int64, pin_memory=True)
            elif not self._copied.done():
                return
            values = self._snapshot.tolist()
            # Not on `compute`: there a few bytes would hold a step up behind a long copy to the host.
            stream = self._device.stream("counters")
            stream.wait(self._device.compute.record())
            stream.copy(self._snapshot, self.table.stats)
            self._copied = stream.record()
        stats.requests, stats.hits, stats.misses, stats.missing_tiles = values[:4]
        stats.filled_tiles, stats.cpu_tiles, stats.fills, stats.evictions = values[4:8]
        stats.ahead_tiles, stats.ahead_judged, stats.ahead_right, stats.promotions = values[8:]
        size = max(one.tile_bytes for one in self._bank.layouts)
        stats.link_bytes, stats.host_bytes = (values[4] + values[8]) * size, values[5] * size

    def resize(self, num_slots: int) -> None:
        """Change the number of slots at a safe point; the warmest stay, moved out of an unmapped tail."""
        device, table = self._device, self.table
        num_slots = max(MIN_SLOTS, min(num_slots, self.pool.max_units - 1))
        device.synchronize()
        if num_slots < self.num_slots:
            self._compact(num_slots)
        if num_slots != self.num_slots:
            before = self.num_slots
            try:
                self.pool.resize(num_slots + 1)
            except CapacityError:
                table.usable.fill_(before + 1)
                raise
        table.usable.fill_(num_slots + 1)
        prepare_victims(table)

    def _compact(self, num_slots: int) -> None:
        table = self.table
        owner = table.expert_of.cpu().numpy()
        keys = (table.fast + table.slow if table.policy == "two_speed" else table.fast).cpu().numpy()
        live = np.flatnonzero(owner >= 0)
        ranked = live[np.argsort(-keys[owner[live]], kind="stable")]
        kept = ranked[:num_slots]
        tail = kept[kept > num_slots]
        used = set(kept.tolist())
        holes = [s for s in range(1, num_slots + 1) if s not in used][: len(tail)]
        self.pool.relocate(tail.tolist(), holes)
        self._rename(owner, tail, np.array(holes, np.int64), ranked[num_slots:])

    def _rename(self, owner: np.ndarray, tail: np.ndarray, holes: np.ndarray, gone: np.ndarray) -> None:
        """Note who moved and who went, in host copies that go back at once."""
        table = self.table
        ours = (table.slot_of, table.expert_of, table.tiles_in)
        slot_of, expert_of, tiles = (t.cpu().numpy() for t in ours)
        moved, come = owner[tail].copy(), tiles[tail].copy()
        slot_of[owner[gone]] = -1
        for emptied in (gone, tail):  # before the holes are taken: a hole may be a place just given up
            expert_of[emptied], tiles[emptied] = -1, 0
        slot_of[moved], expert_of[holes], tiles[holes] = holes, moved, come
        for mine, theirs in zip(ours, (slot_of, expert_of, tiles), strict=True):
            mine.copy_(torch.from_numpy(theirs))
