"""Packing experts into records: what the bank and a container's writer share.

Owns where matrices and biases go within a record, and the refusal of wrong shapes. Doesn't know where records
lie: `place` gives the bytes, `finish` hears that they are complete. Safe from many threads, one expert each.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import Biases, CodedMatrix, ExpertSink, Lay, WeightFormat, WeightSource
from freetoken.experts.record import RecordLayout


class RecordSink(ExpertSink):
    """Takes experts as matrices, in numbers or in a layer's own codes, and lays them out.

    layouts, formats   of each MoE layer
    """

    def __init__(
        self, layouts: Sequence[RecordLayout], formats: Sequence[WeightFormat], num_experts: int
    ) -> None:
        self.layouts, self.formats = tuple(layouts), tuple(formats)
        self.num_layers, self.num_experts = len(self.layouts), num_experts
        self._layings: dict[tuple[object, ...], Lay | None] = {}

    @abc.abstractmethod
    def place(self, layer: int, expert: int) -> Tensor:
        """uint8 [record_bytes]: where this record is written."""

    def place_at(self, layer: int, expert: int) -> tuple[int, Tensor]:
        """The record's address, and the record; without biases, anything that holds it."""
        record = self.place(layer, expert)
        return record.data_ptr(), record

    @abc.abstractmethod
    def finish(self, layer: int, expert: int, record: Tensor) -> None:
        """Every byte that counts is written."""

    def compare(self, layer: int, record: Tensor, numbers: tuple[Tensor, Tensor, Tensor]) -> None:
        """A chance to see what coding numbers made of them."""

    def put(
        self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor, biases: Biases | None = None
    ) -> None:
        """Code one expert's matrices into its record: gate, up [I, H] and down [H, I]."""
        one, fmt = self.layouts[layer], self.formats[layer]
        _check_shapes(one, (layer, expert), gate, up, down)
        record = self.place(layer, expert)
        fmt.pack_tiles(gate, up, down.t(), one.tile_width, one.tiles(record))
        _put_biases(one, (layer, expert), record, biases)
        self.compare(layer, record, (gate, up, down))
        self.finish(layer, expert, record)

    def codes(self, layer: int) -> str:
        return self.formats[layer].name

    def put_coded(
        self,
        layer: int,
        expert: int,
        matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix],
        biases: Biases | None = None,
    ) -> None:
        """Lay out an expert that the checkpoint has in the layer's own codes: gate, up and down."""
        one, fmt = self.layouts[layer], self.formats[layer]
        _check_shapes(one, (layer, expert), *(m["codes"] for m in matrices))
        record = self.place(layer, expert)
        fmt.pack_coded(matrices, one.tile_width, one.tiles(record)[:, : one.code_bytes])
        _put_biases(one, (layer, expert), record, biases)
        self.finish(layer, expert, record)

    def put_stored(
        self,
        layer: int,
        expert: int,
        source: WeightSource,
        names: Sequence[str],
        biases: Biases | None = None,
        *,
        alternating: bool = False,
    ) -> bool:
        one, index = self.layouts[layer], expert if len(names) == 2 else None
        stored = [source.stored(name, index) for name in names]
        flat = [tensor for some in stored for tensor in some]
        shapes = tuple(source.shape(name) for name in names)
        key = (layer, alternating, shapes, *(tensor[:3] for tensor in flat))
        if key not in self._layings:
            shape, fmt = (one.hidden, one.expert_size), self.formats[layer]
            fitting = all(stored) and shapes == self._stored_shapes(one, len(names))
            self._layings[key] = (
                fmt.laying(shape, one.tile_width, stored, alternating=alternating) if fitting else None
            )
        lay = self._layings[key]
        fetched = source.fetch(flat) if lay is not None else None
        if lay is None or fetched is None:
            return False
        address, record = self.place_at(layer, expert)
        if not lay(fetched.addresses, address + one.tiles_offset, one.tile_bytes):
            return False
        _put_biases(one, (layer, expert), record, biases)
        self.finish(layer, expert, record)
        return True

    def _stored_shapes(self, one: RecordLayout, count: int) -> tuple[tuple[int, ...], ...]:
        """Of gate, up and down; of two, which are stacks of all experts'."""
        h, size, all_of_them = one.hidden, one.expert_size, self.num_experts
        if count == 2:
            return (all_of_them, 2 * size, h), (all_of_them, h, size)
        return (size, h), (size, h), (h, size)


def _put_biases(one: RecordLayout, where: tuple[int, int], record: Tensor, biases: Biases | None) -> None:
    """Write float32 [I], [I] and [H] where the layout has room for them; absent ones are zero."""
    if biases is None and not one.biased:
        return
    wide, tall = (one.expert_size,), (one.hidden,)
    if biases is None:
        biases = torch.zeros(wide), torch.zeros(wide), torch.zeros(tall)
    gate, up, down = (b.float() for b in biases)
    down_shape = tall if one.biased else (0,)
    _check(where, ("bias of gate", gate, wide), ("bias of up", up, wide), ("bias of down", down, down_shape))
    record[: 4 * one.hidden].view(torch.float32).copy_(down)
    room = one.tiles(record)[:, one.bias_offset : one.bias_offset + 8 * one.tile_width].view(torch.float32)
    room.unflatten(1, (2, -1)).copy_(
        torch.stack([gate, up]).unflatten(1, (one.num_tiles, -1)).transpose(0, 1)
    )


def _check_shapes(one: RecordLayout, where: tuple[int, int], gate: Tensor, up: Tensor, down: Tensor) -> None:
    wide, tall = (one.expert_size, one.hidden), (one.hidden, one.expert_size)
    _check(where, ("gate", gate, wide), ("up", up, wide), ("down", down, tall))


def _check(where: tuple[int, int], *parts: tuple[str, Tensor, tuple[int, ...]]) -> None:
    for name, tensor, shape in parts:
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{name} of expert {where[1]} in MoE layer {where[0]} is {list(tensor.shape)}, "
                f"expected {list(shape)}.",
                code="invalid_tensor_shape",
                hint="Check that config.json belongs to these weights.",
            )
