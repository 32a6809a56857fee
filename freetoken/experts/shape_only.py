"""Models of shapes only: the real control code of experts at real geometries, on a virtual clock.

No weights, no activations: bank and slots are phantoms, tile arithmetic is skipped, time is charged from
core/cost.py and the machine's rates. Driven by routed ids, step by step. For simulation, replay, tests.

    model = ShapeOnly(shape, machine, make=hybrid.create, policy=Lru(), num_slots=3800)
    seconds = model.step(routing)              one decode step: int32 [L, k] or [L, T, k], any order
    seconds = model.prefill(8192, routing)     one layer-major job: layer -> int32 [T, k]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import (
    Device,
    ExpertBackend,
    Numerics,
    Policy,
    Routing,
    WeightFormat,
)
from freetoken.core.model_config import LayerSpec, ModelConfig, MoESpec
from freetoken.experts.bank import ExpertBank
from freetoken.experts.math import ShapeMath
from freetoken.experts.record import RecordLayout
from freetoken.experts.setup import ExpertSetup

Ids = NDArray[np.int32]
_NOTHING = torch.empty(0, device="meta")


@dataclass(frozen=True)
class Shape:
    """What of a model matters here. Bytes a token, whole model.

    num_tiles      tiles of an expert
    expert_bytes   a record; split evenly over the tiles, whatever the format
    dense_bytes    read besides routed experts at every step: mixers, shared experts, head
    dense_params   the weights behind dense_bytes, for prefill
    layer_fixed_s  launches, router, norms and combine of one layer (s)
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    expert_size: int
    expert_bytes: int
    num_tiles: int = 16
    dense_bytes: float = 0.0
    dense_params: float = 0.0
    layer_fixed_s: float = 0.0

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
        )

    def bank(self) -> ExpertBank:
        """A phantom bank of records that are tiles and nothing else."""
        width = max(1, self.expert_size // self.num_tiles)
        tile_bytes = -(-self.expert_bytes // self.num_tiles)
        one = RecordLayout(self.hidden, width * self.num_tiles, width, tile_bytes)
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


class ShapeOnly:
    """A backend, as `make(setup)` builds it, over phantoms on `device` (a phantom simulated one).

    options are ExpertSetup's: max_fetch, overlap, ring_group, static, chunk_tokens ...
    """

    def __init__(
        self,
        shape: Shape,
        device: Device,
        *,
        make: Callable[[ExpertSetup], ExpertBackend],
        policy: Policy | None = None,
        num_slots: int = 0,
        **options: Any,
    ) -> None:
        self.shape, self.device = shape, device
        setup = ExpertSetup(
            shape.config(),
            shape.bank(),
            device,
            Numerics(),
            policy=policy,
            num_slots=num_slots,
            math=ShapeMath(),
            **options,
        )
        self.setup = setup
        self.backend = make(setup)

    @property
    def stats(self) -> ExpertStats:
        return self.backend.stats

    def step(self, routing: Ids) -> float:
        """Run one decode step; returns its virtual seconds."""
        started = self.device.clock.now()
        for layer in range(self.shape.num_layers):
            ids = np.sort(np.atleast_2d(routing[layer]).astype(np.int32), axis=1)
            self._dense(len(ids))
            routed = Routing(torch.from_numpy(ids), _NOTHING)
            self.backend.begin(layer, _NOTHING, routed, None)  # type: ignore[arg-type]  # no batch
            self.backend.finish(layer)
        took = self.device.clock.now() - started
        self.backend.end_step(took)
        return took

    def prefill(self, num_tokens: int, routing: Callable[[int], Ids] | None = None, seed: int = 0) -> float:
        """Run one job of `num_tokens`; returns its virtual seconds.

        routing   layer -> int32 [num_tokens, k]; None draws it evenly
        """
        started = self.device.clock.now()
        self.backend.begin_job(num_tokens)
        rng = np.random.default_rng(seed)
        for layer in range(self.shape.num_layers):
            ids = routing(layer) if routing else even_routing(rng, num_tokens, self.shape)
            ids = np.sort(ids.astype(np.int32), axis=1)
            self._dense(num_tokens)
            x = torch.empty((num_tokens, 1), device="meta")
            weights = torch.empty((num_tokens, 1), device="meta")
            for _ in self.backend.stream_layer(layer, x, Routing(torch.from_numpy(ids), weights)):
                pass
        self.backend.end_job()
        return self.device.clock.now() - started

    def _dense(self, rows: int) -> None:
        """Charge what a layer costs besides its routed experts."""
        shape, machine = self.shape, self.device.machine
        num_bytes, params = shape.dense_bytes / shape.num_layers, shape.dense_params / shape.num_layers
        took = max(num_bytes / machine.gpu_bw, 2.0 * params * rows / machine.gpu_flops) + shape.layer_fixed_s
        self.device.charge(took * machine.gpu_bw, 0.0)


def even_routing(rng: np.random.Generator, num_tokens: int, shape: Shape) -> Ids:
    """int32 [T, k]: distinct experts, evenly drawn."""
    keys = rng.random((num_tokens, shape.num_experts), dtype=np.float32)
    return np.argpartition(keys, shape.top_k, axis=1)[:, : shape.top_k].astype(np.int32)
