"""Models of shapes only: the real control code of experts at real geometries, on a virtual clock.

No weights, no activations: bank and slots are phantoms, tile arithmetic is skipped, time is charged from
core/cost.py and the machine's rates. Driven by routed ids, step by step. For simulation, replay, tests.

    model = ShapeOnly(geometry, machine, backend="hybrid", num_slots=3800, policy=Lru())
    seconds = model.step(routing)             decode: int32 [L, k] or [L, T, k]
    seconds = model.prefill(8192, routing)    layer-major: int32 [L, n, k] sample of the prompt's routing
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.core.interfaces import WeightFormat
from freetoken.core.model_config import AttentionSpec, LayerSpec, ModelConfig, MoESpec
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import RecordLayout

Ids = NDArray[np.int32]
_NOTHING = torch.empty(0, device="meta")


@dataclass(frozen=True)
class Geometry:
    """What of a model matters here. expert_bytes is a record's size, dense_bytes what each layer reads
    besides routed experts at one token (0 = guessed from hidden)."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    expert_size: int
    expert_bytes: int
    num_tiles: int = 16
    dense_bytes: int = 0

    @property
    def dense_params(self) -> float:
        return self.dense_bytes / 2.0 if self.dense_bytes else 6.0 * self.hidden * self.hidden

    def config(self) -> ModelConfig:
        return ModelConfig(
            family="shape_only",
            vocab_size=1,
            hidden_size=self.hidden,
            layers=tuple(LayerSpec("full", "moe") for _ in range(self.num_layers)),
            max_position=1 << 20,
            norm_eps=1e-6,
            tie_embeddings=True,
            dtype="bfloat16",
            eos_ids=(0,),
            moe=MoESpec(self.num_experts, self.top_k, self.expert_size),
            attention=AttentionSpec(1, 1, 128, 128, 1e4),
        )

    def bank(self) -> ExpertBank:
        """A phantom bank whose tiles are a num_tiles-th of an expert, whatever the format."""
        width = self.expert_size // self.num_tiles
        one = RecordLayout(self.hidden, width * self.num_tiles, width, self.expert_bytes // self.num_tiles)
        num = self.num_layers
        return ExpertBank([one] * num, [PhantomFormat()] * num, self.num_experts, phantom=True)


class PhantomFormat(WeightFormat):
    """Sizes without codes."""

    name = "phantom"

    def tile_bytes(self, tile_width: int, hidden: int) -> int:
        return 6 * tile_width * hidden

    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        raise NotImplementedError("a phantom has no bytes")

    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("a phantom has no bytes")
