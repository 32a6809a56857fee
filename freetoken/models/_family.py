"""What families over the shared decoder have in common: all but their config, and how experts are stored.

A family says `norm_offset` (1.0 where norm weights are stored around zero) and, if names or tensors differ,
its own `decoder`, `check` and `load_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from freetoken.core.interfaces import (
    Device,
    ExpertSink,
    Model,
    ModelFamily,
    Numerics,
    Pool,
    StateSpec,
    WeightSource,
)
from freetoken.core.model_config import ModelConfig
from freetoken.models import _decoder, _tensors


class DecoderFamily(ModelFamily):
    norm_offset = 0.0
    decoder: type[_decoder.Decoder] = _decoder.Decoder

    def place_windows(self, config: ModelConfig, wish: str) -> tuple[ModelConfig, str]:
        return _decoder.place_windows(config, wish)

    def state_specs(self, config: ModelConfig, page_size: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        return _decoder.state_specs(config, page_size, dtype)

    def build(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: Device,
        numerics: Numerics,
        pools: Mapping[str, Pool],
    ) -> Model:
        self.check(config, source)
        return self.decoder(config, source, device, numerics, pools, norm_offset=self.norm_offset)

    def load_experts(self, config: ModelConfig, source: WeightSource, put: ExpertSink) -> None:
        _tensors.load_experts(config, source, put)

    def check(self, config: ModelConfig, source: WeightSource) -> None:
        _tensors.check(config, source)

    def expert_tensors(self, config: ModelConfig, source: WeightSource) -> Sequence[tuple[str, ...]]:
        return _tensors.expert_tensors(config, source)
