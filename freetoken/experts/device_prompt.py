"""What a prompt leaves in the slots: its last rows' experts, warm and at hand when decoding starts.

Owns two changes of the device's table, made while a prompt goes layer by layer: the policy's numbers are
raised by what the last rows used, as the policy's twin does in `seed`; and an expert that they used and
that stands in the ring anyway moves from there to the coldest slot of an expert that is done with. Experts
still to come, in this layer or later ones, keep their slots: the prompt counts on them. Nothing here waits
for the device. Invariant: a slot's bytes are those of the expert that the table names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from freetoken.experts.device_table import SlotTable
from freetoken.experts.policies.two_speed import ONE, SEED_TOKENS
from freetoken.experts.stream import LAST_ROWS
from freetoken.kernels.expert_step import VICTIMS, fetch_ahead, prepare_victims

_NEVER = 1 << 62
"""Colder than nothing, with 0 for a slot."""


class PromptTrace:
    """num_layers, num_experts   L and E; what `SlotTable` holds is changed, never read by the host"""

    def __init__(self, table: SlotTable, num_layers: int, num_experts: int) -> None:
        self._slots, self._layers, self._experts = table, num_layers, num_experts
        device = table.table.words.device
        self._worth = torch.zeros(num_layers * num_experts, dtype=torch.bool, device=device)

    def begin(self) -> None:
        """A prompt starts: what earlier ones left is as good as anything."""
        self._worth.zero_()

    def seed(self, layer: int, ids: Tensor) -> Tensor:
        """Tell the policy of a layer's routing, int32 [T, k]; returns bool [E]: worth a slot afterwards."""
        table, experts = self._slots.table, self._experts
        last = ids[-LAST_ROWS:].flatten()
        counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, last.clamp(min=0).long(), (last >= 0).int())
        used = counts > 0
        if table.policy == "two_speed":
            slow = table.slow[layer * experts : (layer + 1) * experts]
            share = (counts.clamp(max=SEED_TOKENS) * (ONE // SEED_TOKENS)) >> 1
            slow.copy_(torch.where(used, slow - (slow >> 1) + share, slow))
        quota = min(experts, max(1, self._slots.num_slots // self._layers))
        order = counts * experts + torch.arange(experts - 1, -1, -1, device=ids.device)
        wanted = torch.zeros(experts, dtype=torch.bool, device=ids.device)
        wanted[order.topk(quota).indices] = True
        wanted &= used
        self._worth[layer * experts : (layer + 1) * experts] |= wanted
        return wanted

    def keep(self, layer: int, done: int, ring: Mapping[int, int], wanted: Tensor) -> None:
        """Of the experts that stand in the ring, by their slots, give those wanted a slot of their own.

        Experts of the layer below `done` have met all rows.
        """
        table, place = self._slots.table, self._slots.places[layer]
        device, count = wanted.device, len(ring)
        assert count <= VICTIMS
        told = torch.tensor([list(ring), list(ring.values())])
        local, source = (told.pin_memory() if device.type == "cuda" else told).to(device, non_blocking=True)
        mine = layer * self._experts + local
        own, want = table.slot_of[mine], wanted[local]
        where = self._coldest(layer * self._experts + done, count)
        absent = want & (own <= 0)
        rank = (absent.cumsum(0) - 1).clamp(min=0)
        comes = absent & (where[rank] > 0)
        goes = comes | (want & (own > 0))
        slot = torch.where(comes, where[rank], torch.where(goes, own, 0).long())
        before = table.expert_of[slot].long()
        gone = comes & (before >= 0)
        table.slot_of[torch.where(gone, before, mine)] = torch.where(gone, -1, own)
        table.slot_of[mine] = torch.where(goes, slot.int(), own)
        # What doesn't go names slot 0, which is no slot and keeps nobody.
        table.expert_of[slot] = torch.where(goes, mine, -1).int()
        table.tiles_in[slot] = torch.where(goes, place.num_tiles, 0).int()
        moves = torch.full((VICTIMS + 1, 4), -1, dtype=torch.int32, device=device)
        line = torch.where(goes, goes.cumsum(0) - 1, VICTIMS)
        tiles = torch.full_like(slot, place.num_tiles)
        moves[line] = torch.stack([source, slot, torch.zeros_like(slot), tiles], 1).int()
        pool = replace(place, layer=0, records=place.slots, address=place.slots_address)
        fetch_ahead(replace(table, ahead=moves[:VICTIMS]), pool)

    def end_layer(self, layer: int) -> None:
        """Slots have changed hands: look for victims anew."""
        prepare_victims(self._slots.table, layer, self._experts)

    def _keys(self) -> Tensor:
        """int64 [L * E]: what the policy orders experts by."""
        table = self._slots.table
        keys = table.fast.long()
        return keys + table.slow if table.policy == "two_speed" else keys

    def _coldest(self, end: int, count: int) -> Tensor:
        """Slots, coldest first, of nobody or of an expert below `end` that the prompt won't miss; or 0."""
        table = self._slots.table
        owner = table.expert_of.long()
        slot = torch.arange(len(owner), device=owner.device)
        keys = torch.where(owner >= 0, self._keys()[owner.clamp(min=0)], -1)
        givable = (slot > 0) & (slot < table.usable) & (owner < end)
        givable &= (owner < 0) | ~self._worth[owner.clamp(min=0)]
        both = torch.where(givable, (keys << 32) + slot, _NEVER)
        best = both.topk(min(count, len(owner)), largest=False).values
        best = torch.cat([best, best.new_full((count - len(best),), _NEVER)])
        return best & 0xFFFFFFFF
