"""The in-order fill queue: a list of runs of tiles, written on `compute`, carried out on `fill`.

The list lies in device memory, as a gather kernel will read it: the copier sees it only after its stream
has waited for `compute`, which also orders the copies after whatever read the victims' slots.
Doesn't choose what to fill. Whoever computes with filled tiles waits for `fill` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetoken.core.interfaces import Device, Event
from freetoken.experts.slots import ExpertSlots


@dataclass(frozen=True)
class Fill:
    """Bring tiles [first, last) of `expert` into its slot."""

    expert: int
    first: int
    last: int


class FillQueue:
    """`link_bytes` counts what was enqueued."""

    def __init__(self, slots: ExpertSlots, device: Device, most: int) -> None:
        self._slots, self._device = slots, device
        self._compute, self._fill = device.compute, device.stream("fill")
        self._list = torch.zeros((most + 1, 4), dtype=torch.int32)
        self.link_bytes = 0
        self.max_bytes = 0

    def submit(self, fills: Sequence[Fill]) -> Event:
        """Enqueue this layer-step's fills, which now may use their slots; returns their event."""
        slots = self._slots
        if fills:
            self._hand_over(fills)
        for fill in fills:
            slots.sent(fill.expert, fill.last)
        event = self._fill.record()
        slots.expect(event, [fill.expert for fill in fills])
        return event

    def follow(self, max_bytes: int) -> None:
        """Enqueue up to `max_bytes` (at least a tile) of the tails of experts that were cut earlier."""
        slots, sent = self._slots, []
        while slots.rest and max_bytes > 0:
            expert, generation = slots.rest[0]
            slot = int(slots.slot_of[expert])
            if (
                slot < 0
                or slots.generation[slot] != generation
                or slots.tiles_sent[slot] >= self._whole(expert)
            ):
                slots.rest.popleft()
                continue
            first = int(slots.tiles_sent[slot])
            one = slots.bank.layouts[expert // slots.bank.num_experts]
            last = min(one.num_tiles, first + max(1, max_bytes // one.tile_bytes))
            self._copy(expert, slot, first, last)
            slots.sent(expert, last)
            max_bytes -= (last - first) * one.tile_bytes
            sent.append(expert)
        if sent:
            slots.expect(self._fill.record(), list(dict.fromkeys(sent)))

    def _whole(self, expert: int) -> int:
        return int(self._slots.num_tiles[expert])

    def _hand_over(self, fills: Sequence[Fill]) -> None:
        slots = self._slots
        rows = [(len(fills), 0, 0, 0)]
        rows += [(f.expert, int(slots.slot_of[f.expert]), f.first, f.last) for f in fills]
        if slots.bank.phantom:
            self._fill.wait(self._compute.record())
        else:
            self._compute.copy(self._list[: len(rows)], torch.tensor(rows, dtype=torch.int32))
            self._fill.wait(self._compute.record())
            count = int(self._list[0, 0])
            rows = self._list[: max(0, count) + 1].tolist()
        for expert, slot, first, last in rows[1:]:
            self._copy(expert, slot, first, last)

    def _copy(self, expert: int, slot: int, first: int, last: int) -> None:
        bank = self._slots.bank
        start, end = bank.layouts[expert // bank.num_experts].tile_range(first, last)
        self._fill.copy(self._slots.view()[slot, start:end], bank.record(expert)[start:end])
        self.link_bytes += end - start
