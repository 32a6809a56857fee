"""Qwen3.5 and Qwen3.6 MoE: gated DeltaNet layers, every fourth gated full attention, a shared expert.

Text only: the language part of a multimodal checkpoint is read from `text_config`. Norm weights are
stored around zero, except the DeltaNet's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.core.model_config import (
    Activation,
    ConfigReader,
    DeltaSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
)
from freetoken.models import _config
from freetoken.models._family import DecoderFamily

_MIXER_OF = {"linear_attention": "gated_delta", "full_attention": "full"}

TINY: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "eos_token_id": 2,
    "dtype": "float32",
}


def _layer_kinds(read: ConfigReader, num_layers: int) -> tuple[LayerSpec, ...]:
    interval = read.read("full_attention_interval", int, default=4)
    regular = [
        "full_attention" if (i + 1) % max(interval, 1) == 0 else "linear_attention" for i in range(num_layers)
    ]
    types = _config.layer_types(read, _MIXER_OF, regular) or regular
    read.require(len(types) == num_layers, f"layer_types has {len(types)} entries for {num_layers} layers")
    return tuple(LayerSpec(_MIXER_OF[t], "moe") for t in types)


def _delta(read: ConfigReader) -> DeltaSpec:
    spec = DeltaSpec(
        num_k_heads=read.read("linear_num_key_heads", int),
        num_v_heads=read.read("linear_num_value_heads", int),
        k_dim=read.read("linear_key_head_dim", int),
        v_dim=read.read("linear_value_head_dim", int),
        conv_kernel=read.read("linear_conv_kernel_dim", int, default=4),
    )
    read.require(
        spec.num_v_heads % max(spec.num_k_heads, 1) == 0, "linear key heads don't divide the value heads"
    )
    return spec


class Qwen35MoeFamily(DecoderFamily):
    model_types = ("qwen3_5_moe", "qwen3_5_moe_text")
    TINY = TINY
    norm_offset = 1.0

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        inner = raw.get("text_config")
        text: Mapping[str, Any] = {**raw, **inner} if isinstance(inner, Mapping) else raw
        read = ConfigReader(text, "config.json")
        hidden = read.read("hidden_size", int)
        layers = _layer_kinds(read, _config.num_layers(read))
        activation = _config.activation_name(read)
        moe = MoESpec(
            num_experts=_config.num_experts(read, "num_experts", "num_local_experts"),
            top_k=read.read("num_experts_per_tok", int, "num_experts_per_token"),
            expert_size=read.read("moe_intermediate_size", int),
            norm_topk=read.read("norm_topk_prob", bool, default=True),
            shared_size=read.read("shared_expert_intermediate_size", int, default=0),
            activation=Activation(activation),
        )
        read.require(0 < moe.top_k <= moe.num_experts, "num_experts_per_tok must be 1..num_experts")
        config = ModelConfig(
            family="qwen3_5_moe",
            vocab_size=read.read("vocab_size", int),
            hidden_size=hidden,
            layers=layers,
            max_position=_config.max_position(read, 32768),
            norm_eps=read.read("rms_norm_eps", float, default=1e-6),
            # A multimodal wrapper ties by its own switch, not by the text part's.
            tie_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            dtype=_config.dtype_name(text),
            eos_ids=_config.eos_ids(text) or _config.eos_ids(raw),
            moe=moe,
            attention=_config.attention_spec(
                read, hidden, partial=0.25, gated=read.read("attn_output_gate", bool, default=True)
            ),
            delta=_delta(read),
            activation=activation,
        )
        read.finish()
        return config


FAMILY = Qwen35MoeFamily()
