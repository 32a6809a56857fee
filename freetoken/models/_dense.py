"""What the dense families share: one config reader with the switches in which they differ.

A dense model has no experts: all of its layers are full attention and a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.core.model_config import AttentionSpec, ConfigReader, ModelConfig
from freetoken.models import _config
from freetoken.models._family import DecoderFamily

TINY: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 2,
    "dtype": "float32",
}
"""A small config.json that every dense family reads."""


@dataclass(frozen=True)
class Switches:
    """What a family's config leaves unsaid.

    qk_norm     q and k are normed per head
    qkv_bias    q, k and v always have biases, the output never; None: `attention_bias` decides for all four
    head_dim    what an absent `head_dim` means; 0: hidden_size / heads
    ties        what an absent `tie_word_embeddings` means
    """

    qk_norm: bool = False
    qkv_bias: bool | None = None
    head_dim: int = 0
    ties: bool = False


class DenseFamily(DecoderFamily):
    """A decoder of full attention and gated MLPs; a subclass names itself and sets the switches."""

    name: str
    switches = Switches()

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        read = ConfigReader(raw, "config.json")
        hidden = read.read("hidden_size", int)
        layers = _config.num_layers(read)
        config = ModelConfig(
            family=self.name,
            vocab_size=read.read("vocab_size", int),
            hidden_size=hidden,
            layers=tuple(_config.softmax_layer("dense", w) for w in self.windows(read, layers)),
            max_position=_config.max_position(read, 32768),
            norm_eps=read.read("rms_norm_eps", float, default=1e-6),
            tie_embeddings=read.read("tie_word_embeddings", bool, default=self.switches.ties),
            dtype=_config.dtype_name(raw),
            eos_ids=_config.eos_ids(raw),
            attention=self._attention(read, hidden),
            dense_size=read.read("intermediate_size", int),
            dense_bias=read.read("mlp_bias", bool, default=False),
            activation=_config.activation_name(read),
        )
        read.finish()
        return config

    def _attention(self, read: ConfigReader, hidden: int) -> AttentionSpec:
        own = self.switches
        known = {} if own.qkv_bias is None else {"bias": own.qkv_bias}
        return _config.attention_spec(read, hidden, head_dim=own.head_dim or 0, qk_norm=own.qk_norm, **known)

    def windows(self, read: ConfigReader, layers: int) -> Sequence[int | None]:
        """Each layer's sliding window, None = all tokens. Qwen's switches; others override.

        `max_window_layers` counts the layers at the bottom that see everything.
        """
        if not read.read("use_sliding_window", bool, default=False):
            return [None] * layers
        whole = min(read.read("max_window_layers", int, default=28), layers)
        window = read.read("sliding_window", int, default=4096)
        return [None] * whole + [window] * (layers - whole)
