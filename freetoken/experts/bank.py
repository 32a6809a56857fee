"""The expert bank: every routed expert's record in host memory, the source of truth.

Owns one contiguous, 4096-byte aligned buffer, filled in its final layout while a checkpoint is read;
a `phantom` bank has sizes but no bytes. Doesn't know where else an expert is resident.
Expert id = layer * num_experts + expert, here and everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import Biases, CodedMatrix, ExpertSink, WeightFormat
from freetoken.core.model_config import ModelConfig
from freetoken.experts.record import RECORD_ALIGN, RecordLayout, layout
from freetoken.native.library import library

_HUGE_FROM = 64 << 20


class ExpertBank(ExpertSink):
    """`layouts` names each MoE layer's record geometry, `formats` its weight format.

    num_layers, num_experts   L and E
    buffer                    uint8 [total bytes], a meta tensor if phantom
    """

    def __init__(
        self,
        layouts: Sequence[RecordLayout],
        formats: Sequence[WeightFormat],
        num_experts: int,
        *,
        phantom: bool = False,
    ) -> None:
        self.layouts, self.formats = tuple(layouts), tuple(formats)
        self.num_layers, self.num_experts = len(self.layouts), num_experts
        self.phantom = phantom
        self._starts = [0]
        for one in self.layouts:
            self._starts.append(self._starts[-1] + one.record_bytes * num_experts)
        self.buffer = _aligned(self._starts[-1], phantom)
        self._layers = [
            self.buffer[a:b].view(num_experts, one.record_bytes)
            for a, b, one in zip(self._starts[:-1], self._starts[1:], self.layouts, strict=True)
        ]
        self._seen = bytearray(self.num_layers * num_experts)

    @property
    def total_bytes(self) -> int:
        return self._starts[-1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the largest record."""
        return max(one.record_bytes for one in self.layouts)

    def layer(self, layer: int) -> Tensor:
        """uint8 [E, record_bytes], a view."""
        return self._layers[layer]

    def record(self, expert_id: int) -> Tensor:
        """uint8 [record_bytes], a view."""
        return self._layers[expert_id // self.num_experts][expert_id % self.num_experts]

    def put(
        self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor, biases: Biases | None = None
    ) -> None:
        """Code one expert's matrices into its record: gate, up [I, H] and down [H, I]."""
        one, fmt = self.layouts[layer], self.formats[layer]
        self._check_shapes(layer, expert, gate, up, down)
        self._put_biases(layer, expert, biases)
        tiles = self._layers[layer][expert][one.tiles_offset : one.used_bytes]
        fmt.pack_tiles(gate, up, down.t(), one.tile_width, tiles.view(one.num_tiles, one.tile_bytes))
        self._seen[layer * self.num_experts + expert] = 1

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
        codes = [m["codes"] for m in matrices]
        self._check_shapes(layer, expert, *codes)
        self._put_biases(layer, expert, biases)
        record = self._layers[layer][expert]
        for tile in range(one.num_tiles):
            a = one.tiles_offset + tile * one.tile_bytes
            fmt.pack_coded(matrices, tile, one.tile_width, record[a : a + one.code_bytes])
        self._seen[layer * self.num_experts + expert] = 1

    def missing(self) -> list[int]:
        """Expert ids that nobody has put yet."""
        return [i for i, seen in enumerate(self._seen) if not seen]

    def checksum(self, expert_id: int) -> int:
        """CRC-32 of a record, to compare a copy with its source."""
        return zlib.crc32(self.record(expert_id).numpy().data)

    def _put_biases(self, layer: int, expert: int, biases: Biases | None) -> None:
        """Write float32 [I], [I] and [H] where the layout has room for them; absent ones stay zero."""
        one = self.layouts[layer]
        if biases is None:
            return
        gate, up, down = (b.float() for b in biases)
        wide, tall = (one.expert_size,), (one.hidden,) if one.biased else (0,)
        _check(
            layer,
            expert,
            ("bias of gate", gate, wide),
            ("bias of up", up, wide),
            ("bias of down", down, tall),
        )
        record = self._layers[layer][expert]
        record[: 4 * one.hidden].view(torch.float32).copy_(down)
        tiles = record[one.tiles_offset : one.used_bytes].view(one.num_tiles, one.tile_bytes)
        room = tiles[:, one.bias_offset : one.bias_offset + 8 * one.tile_width].view(torch.float32)
        room.unflatten(1, (2, -1)).copy_(
            torch.stack([gate, up]).unflatten(1, (one.num_tiles, -1)).transpose(0, 1)
        )

    def _check_shapes(self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        one = self.layouts[layer]
        wide, tall = (one.expert_size, one.hidden), (one.hidden, one.expert_size)
        _check(layer, expert, ("gate", gate, wide), ("up", up, wide), ("down", down, tall))


def _check(layer: int, expert: int, *parts: tuple[str, Tensor, tuple[int, ...]]) -> None:
    for name, tensor, shape in parts:
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{name} of expert {expert} in MoE layer {layer} is {list(tensor.shape)}, "
                f"expected {list(shape)}.",
                code="invalid_tensor_shape",
                hint="Check that config.json belongs to these weights.",
            )


def _aligned(num_bytes: int, phantom: bool) -> Tensor:
    if phantom:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    raw = torch.empty(num_bytes + RECORD_ALIGN, dtype=torch.uint8)
    start = -raw.data_ptr() % RECORD_ALIGN
    lib = library()
    if lib is not None and num_bytes >= _HUGE_FROM:  # before the first touch; fewer page walks while reading
        lib.advise_huge(raw.data_ptr() + start, num_bytes)
    return raw[start : start + num_bytes]


def create(
    config: ModelConfig,
    formats: WeightFormat | Sequence[WeightFormat],
    *,
    phantom: bool = False,
    width: int = 0,
) -> ExpertBank:
    """Make the empty bank of a model; `formats` names one per MoE layer, or the one of all."""
    assert config.moe is not None
    hidden, size = config.hidden_size, config.moe.expert_size
    if isinstance(formats, WeightFormat):
        formats = [formats] * config.num_moe_layers
    layouts = [layout(hidden, size, fmt, width, biased=config.moe.bias) for fmt in formats]
    return ExpertBank(layouts, formats, config.moe.num_experts, phantom=phantom)
