"""A prompt's experts on the device: each layer's absent records cross the link once, behind the products.

Owns a ring of slots lent by the table's tail and a copy stream. Experts are taken in ascending order in
groups: resident ones are used in place, absent ones are copied into the ring ahead of their turn, also
across layers, for nearly all will be needed. Coded experts are expanded, some at a time, into one place.
What the prompt's last tokens wanted most moves from the ring to slots of experts done with. The host knows
who is resident since the job began, or since a decode step was interposed; the products never wait for it.
Order: a group's products wait for its copies, its copies for the products that used the ring's places before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.interfaces import Device, Event, Routing
from freetoken.experts.bank import ExpertBank
from freetoken.experts.device_table import SlotTable
from freetoken.experts.gpu_support import expanded, is_plain
from freetoken.experts.setup import ExpertSetup
from freetoken.kernels import expert_step as step
from freetoken.kernels.expand_records import expand_records
from freetoken.kernels.expert_step import Place, Table
from freetoken.kernels.grouped_mlp import Form, grouped_mlp, sort_routes

GROUPS = 4
RING_SHARE = 8
MOST_GROUP = 16
LAST_ROWS = 32
"""Tokens of a prompt that tell what decode will want: 64 tell it less well, 128 much less (replayed)."""


@dataclass
class Group:
    """Absent experts [first, last) of a layer: their places in the ring, and when they are there."""

    layer: int
    first: int
    last: int
    experts: list[int]
    slots: list[int]
    event: Event | None = None


class DeviceStream:
    def __init__(self, setup: ExpertSetup, table: SlotTable, *, share: int = RING_SHARE) -> None:
        """share: the ring takes at most one of so many slots."""
        assert setup.config.moe is not None
        self._setup, self._table, self._share = setup, table, share
        self._bank: ExpertBank = setup.bank
        self._device: Device = setup.device
        self._activation = setup.config.moe.activation
        self._dtype = setup.numerics.dtype
        self._place: tuple[Tensor, Tensor] | None = None
        self._copy = self._device.stream("prefill")
        self._freed: deque[tuple[list[int], Event | None]] = deque()
        self._ahead: deque[Group] = deque()
        self._next = (0, 0)
        self._resident: list[list[int]] = []
        self.link_bytes = 0
        self._changed, self._layer = False, 0
        self.is_open = False

    def open(self) -> None:
        """Take the ring, learn who is resident, start the first copies."""
        self._take_ring()
        self._learn()
        self._changed, self._layer = False, 0
        self._next = (0, 0)
        self.is_open = True
        self._run_ahead()

    def _take_ring(self) -> None:
        count = self._table.lend(max(2, self._table.num_slots // self._share), GROUPS * MOST_GROUP)
        size = max(1, len(count) // GROUPS)
        places = [count[i : i + size] for i in range(0, size * (len(count) // size), size)]
        if not self._setup.overlap:
            places = places[:1]  # each copy waits for the products that used the one before
        self._freed = deque((some, None) for some in places)
        self._copy.wait(self._device.compute.record())  # the ring's places are being emptied
        self._ahead.clear()

    def resize(self, num_slots: int) -> None:
        """Change the number of slots, also amid a prompt: its ring is lent and loaded anew."""
        self._table.resize(num_slots)
        if self.is_open:
            self._take_ring()
            self._changed = True

    def close(self) -> None:
        """Give the ring back behind the copies that are still on their way to it. The host doesn't wait."""
        if self.is_open:
            self.is_open = False
            self._device.compute.wait(self._copy.record())
            self._table.give_back()

    def layer(
        self, layer: int, x: Tensor, routing: Routing, chunk_tokens: int
    ) -> Generator[None, None, Tensor]:
        """float32 [T, H] of a macro-chunk's layer; yields between groups."""
        cuts = [slice(a, a + chunk_tokens) for a in range(0, x.shape[0], chunk_tokens)]
        routes = [sort_routes(routing.ids[cut], self._bank.num_experts) for cut in cuts]
        outs = [torch.zeros(x[cut].shape, dtype=torch.float32, device=x.device) for cut in cuts]
        form, done = self._form(layer), 0
        table, place = self._table.table, self._table.places[layer]
        step.seed(table, place, routing.ids[-LAST_ROWS:].contiguous())
        if layer < self._layer:  # they begin anew, and some have given slots away
            self._changed = True
        self._layer = layer
        while done < self._bank.num_experts:
            if self._changed:
                self._look_again(layer, done)
            group = self._group(layer, done)
            addresses = self._addresses(layer, group)
            if group.event is not None:
                self._device.compute.wait(group.event)
            for span, where in self._readable(layer, (done, group.last), addresses):
                for cut, route, out in zip(cuts, routes, outs, strict=True):
                    grouped_mlp(x[cut], route, routing.weights[cut], where, form, span, out)
            if group.slots:
                self._promote(table, place, addresses, (done, group.last))
                self._freed.append((group.slots, self._device.compute.record()))
            self._run_ahead()
            done = group.last
            yield
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _promote(self, table: Table, place: Place, addresses: Tensor, span: tuple[int, int]) -> None:
        """What decode will want moves out of the ring, to slots of experts that are done with.

        Copies are planned for the residents still to come.
        """
        quota = max(1, self._table.num_slots // self._bank.num_layers)
        step.prepare_victims(table, place.layer * self._bank.num_experts + span[1])
        step.promote(table, place, addresses, span, quota)
        step.fetch_ahead(table, place, addresses)

    def interrupted(self) -> None:
        """A decode step ran in between: slots may have changed hands, so plans are looked through again."""
        self._changed = True

    def _look_again(self, layer: int, done: int) -> None:
        """Keep the groups ahead whose residents are still there; the others are cut and copied anew."""
        self._changed = False
        self._learn()
        kept: deque[Group] = deque()
        for group in self._ahead:
            copied = set(group.experts)
            here = self._resident[group.layer]
            if not all(here[e] or e in copied for e in range(group.first, group.last)):
                break
            kept.append(group)
        for group in list(self._ahead)[len(kept) :]:
            if group.slots:
                self._freed.append((group.slots, group.event))
        self._ahead = kept
        last = kept[-1] if kept else Group(layer, done, done, [], [])
        self._next = (last.layer, last.last)
        if last.last == self._bank.num_experts:
            self._next = (last.layer + 1, 0)
        self._run_ahead()

    def _learn(self) -> None:
        self._resident = self._table.resident()

    def _group(self, layer: int, done: int) -> Group:
        """The next span of the layer: up to the end of the group whose copies come next."""
        if self._ahead and self._ahead[0].layer == layer:
            return self._ahead.popleft()
        return Group(layer, done, self._bank.num_experts, [], [])

    def _addresses(self, layer: int, group: Group) -> Tensor:
        """int64 [E] device addresses: slots where resident, the ring where copied."""
        pool, size = self._table.base, self._bank.slot_bytes
        values = [pool + slot * size if slot else 0 for slot in self._resident[layer]]
        for expert, slot in zip(group.experts, group.slots, strict=False):
            values[expert] = pool + slot * size
        host = torch.tensor(values, dtype=torch.int64)
        if self._device.torch_device.type == "cpu":
            return host
        return host.pin_memory().to(self._device.torch_device, non_blocking=True)

    def _run_ahead(self) -> None:
        """Enqueue copies as far as there are places, layer after layer."""
        while self._freed and self._next[0] < self._bank.num_layers:
            layer, first = self._next
            slots, free = self._freed.popleft()
            group = self._cut(layer, first, slots)
            if group.last == self._bank.num_experts:
                self._next = (layer + 1, 0)
            else:
                self._next = (layer, group.last)
            if not group.experts:
                self._freed.appendleft((slots, free))
                self._ahead.append(Group(layer, first, group.last, [], []))
                continue
            if free is not None:
                self._copy.wait(free)
            view, records = self._table.pool.view(), self._bank.layer(layer)
            for expert, slot in zip(group.experts, slots, strict=False):
                self._copy.copy(view[slot][: records.shape[1]], records[expert])
            if not self._device.rehearsing:
                self.link_bytes += len(group.experts) * records.shape[1]
            group.event = self._copy.record()
            self._ahead.append(group)

    def _cut(self, layer: int, first: int, slots: list[int]) -> Group:
        """Experts from `first` on until the absent ones fill the places."""
        experts: list[int] = []
        last = first
        while last < self._bank.num_experts:
            if not self._resident[layer][last]:
                if len(experts) == len(slots):
                    break
                experts.append(last)
            last += 1
        return Group(layer, first, last, experts, slots)

    def _readable(
        self, layer: int, span: tuple[int, int], addresses: Tensor
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Spans that cover `span`, each with addresses int64 [E] of records of plain numbers.

        What a span's addresses name is overwritten for the next one.
        """
        coded = self._table.places[layer].coded
        if is_plain(coded, self._dtype):
            yield span, addresses
            return
        count, each = expanded(coded, self._bank.num_experts)
        place, starts = self._expanded(count, each)
        for first in range(span[0], span[1], count):
            some = (first, min(first + count, span[1]))
            expand_records(addresses[some[0] : some[1]], coded, place, self._dtype)
            yield some, starts - first * each

    def _expanded(self, count: int, each: int) -> tuple[Tensor, Tensor]:
        """(uint8 [count, each], int64 [E] addresses if the first were expert 0's)."""
        if self._place is None or self._place[0].shape != (count, each):
            device = self._device.torch_device
            bytes_ = torch.empty(count, each, dtype=torch.uint8, device=device)
            starts = bytes_.data_ptr() + torch.arange(self._bank.num_experts, device=device) * each
            self._place = (bytes_, starts)
        return self._place

    def _form(self, layer: int) -> Form:
        one, coded = self._bank.layouts[layer], self._table.places[layer].coded
        tile, start, bias = one.tile_bytes, one.tiles_offset, coded.bias_offset
        if not is_plain(coded, self._dtype):
            _, tile, start, bias = coded.plain_bytes()
        return Form(one.hidden, one.expert_size, one.tile_width, tile, start, bias, self._activation)
