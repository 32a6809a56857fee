"""The expert bank: every routed expert's record in host memory, the source of truth.

Owns one contiguous, 4096-byte aligned buffer, filled in its final layout while a checkpoint is read;
a `phantom` bank has sizes but no bytes. Doesn't know where else an expert is resident.
Expert id = layer * num_experts + expert, here and everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from freetoken.core.interfaces import WeightFormat
from freetoken.core.model_config import ModelConfig
from freetoken.experts import host_pages
from freetoken.experts.arrivals import Arrivals
from freetoken.experts.packing import RecordSink
from freetoken.experts.record import RECORD_ALIGN, RecordLayout, layout


class ExpertBank(RecordSink):
    """`layouts` names each MoE layer's record geometry, `formats` its weight format.

    num_layers, num_experts   L and E
    buffer                    uint8 [total bytes], a meta tensor if phantom
    arrivals                  which records are there; `put` notes them
    fills                     True while somebody loads in the background: reading a record waits for it
    """

    def __init__(
        self,
        layouts: Sequence[RecordLayout],
        formats: Sequence[WeightFormat],
        num_experts: int,
        *,
        phantom: bool = False,
    ) -> None:
        super().__init__(layouts, formats, num_experts)
        self.phantom = phantom
        self._starts = [0]
        for one in self.layouts:
            self._starts.append(self._starts[-1] + one.record_bytes * num_experts)
        self._gathers = False
        if phantom:
            self.buffer = torch.empty(self._starts[-1], dtype=torch.uint8, device="meta")
        else:
            self.buffer, self._gathers = host_pages.allocate(self._starts[-1], RECORD_ALIGN)
        self._base = 0 if phantom else self.buffer.data_ptr()
        self._layers = [
            self.buffer[a:b].view(num_experts, one.record_bytes)
            for a, b, one in zip(self._starts[:-1], self._starts[1:], self.layouts, strict=True)
        ]
        self.arrivals = Arrivals(self.num_layers * num_experts)
        self.fills = False
        self._addresses: dict[int, int] = {}

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

    def require(self, expert_ids: Iterable[int]) -> None:
        """Wait until these records are there, if they are still being loaded."""
        if self.fills and not self.arrivals.complete:
            self.arrivals.require(expert_ids)

    def record(self, expert_id: int) -> Tensor:
        """uint8 [record_bytes], a view of a record that is there."""
        self.require((expert_id,))
        return self._layers[expert_id // self.num_experts][expert_id % self.num_experts]

    def address(self, layer: int, pin: Callable[[Tensor], int]) -> int:
        """Where a device sees this layer's records, 0 if it can't; pinned once, when first asked for."""
        if layer not in self._addresses:
            self._addresses[layer] = pin(self._layers[layer])
        return self._addresses[layer]

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Put a full bank into huge pages if it isn't there yet; not for memory that is pinned."""
        if self._gathers:
            host_pages.gather(self.buffer, stopped)

    def place(self, layer: int, expert: int) -> Tensor:
        return self._layers[layer][expert]

    def place_at(self, layer: int, expert: int) -> tuple[int, Tensor]:
        one = self.layouts[layer]
        if one.biased:
            return super().place_at(layer, expert)
        return self._base + self._starts[layer] + expert * one.record_bytes, self.buffer

    def finish(self, layer: int, expert: int, record: Tensor) -> None:
        self.arrivals.arrived(layer * self.num_experts + expert)

    def missing(self) -> list[int]:
        """Expert ids that nobody has put yet."""
        return self.arrivals.missing()

    def checksum(self, expert_id: int) -> int:
        """CRC-32 of a record, to compare a copy with its source."""
        return zlib.crc32(self.record(expert_id).numpy().data)


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
