"""A model that computes nothing: constant logits, no layers, no experts, no checkpoint.

It measures what the engine itself costs. Its pages exist, so that scheduling and paging really run; with
`state_bytes` it has a recurrent state as well, which can be resumed at checkpoints only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.interfaces import (
    Device,
    ExpertSink,
    Model,
    ModelFamily,
    Numerics,
    Pool,
    Routing,
    StateSpec,
    WeightSource,
)
from freetoken.core.model_config import ConfigReader, ModelConfig

TINY: Mapping[str, Any] = {
    "model_type": "null",
    "vocab_size": 128,
    "hidden_size": 1,
    "max_position_embeddings": 512,
    "token_id": 5,
}
_PAGE_BYTES = 256


class NullModel(Model):
    """Gives every row the same logits: 1 for `token_id`, 0 for all others."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self._hidden = torch.zeros(1, config.hidden_size, device=device)
        self._logits = torch.zeros(1, config.vocab_size, device=device)
        self._logits[0, config.extra["token_id"]] = 1.0

    def embed(self, batch: Batch) -> Tensor:
        return self._hidden.expand(batch.num_rows, -1)

    def mix(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        return h

    def route(self, layer: int, h: Tensor, batch: Batch) -> tuple[Tensor, Routing]:
        none = torch.empty(len(h), 0, device=h.device)
        return h, Routing(none.to(torch.int32), none)

    def combine(self, layer: int, h: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        return h

    def dense(self, layer: int, h: Tensor) -> Tensor:
        return h

    def head(self, h: Tensor, rows: Tensor | None) -> Tensor:
        return self._logits.expand(len(h if rows is None else rows), -1)


class NullFamily(ModelFamily):
    model_types = ("null",)
    TINY = TINY
    has_weights = False

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        read = ConfigReader(raw, "config.json")
        vocab_size = read.read("vocab_size", int)
        token_id = read.read("token_id", int, default=0)
        read.require(0 <= token_id < max(vocab_size, 1), "token_id must be below vocab_size")
        config = ModelConfig(
            family="null",
            vocab_size=vocab_size,
            hidden_size=read.read("hidden_size", int, default=1),
            layers=(),
            max_position=read.read("max_position_embeddings", int, default=32768),
            norm_eps=1e-6,
            tie_embeddings=True,
            dtype="float32",
            eos_ids=(),
            extra={"token_id": token_id, "state_bytes": read.read("state_bytes", int, default=0)},
        )
        read.finish()
        return config

    def state_specs(self, config: ModelConfig, page_size: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        pages = StateSpec("null", "page", _PAGE_BYTES, page_sizes=(page_size,))
        state_bytes = int(config.extra["state_bytes"])
        if not state_bytes:
            return (pages,)
        return pages, StateSpec("null_state", "state", state_bytes, resume="checkpoint")

    def build(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: Device,
        numerics: Numerics,
        pools: Mapping[str, Pool],
    ) -> Model:
        """`source` may be empty; nothing is read."""
        return NullModel(config, device.torch_device)

    def load_experts(self, config: ModelConfig, source: WeightSource, put: ExpertSink) -> None:
        """There are none."""


FAMILY = NullFamily()
