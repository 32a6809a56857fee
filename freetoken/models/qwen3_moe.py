"""Qwen3 MoE: full attention with normed q and k, routed experts, some layers dense if asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.core.model_config import (
    Activation,
    ConfigReader,
    LayerSpec,
    ModelConfig,
    MoESpec,
)
from freetoken.models import _config
from freetoken.models._family import DecoderFamily

TINY: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "eos_token_id": 2,
    "dtype": "float32",
}


def _layers(read: ConfigReader, num_experts: int) -> tuple[LayerSpec, ...]:
    """Every `decoder_sparse_step`-th layer has experts unless `mlp_only_layers` names it."""
    step = read.read("decoder_sparse_step", int, default=1)
    read.require(step > 0, "decoder_sparse_step must be positive")
    dense = read.read("mlp_only_layers", list, default=[])
    slides = read.read("use_sliding_window", bool, default=False)
    window = read.read("sliding_window", int, default=4096) if slides else None
    sparse = [
        i not in dense and num_experts > 0 and (i + 1) % max(step, 1) == 0
        for i in range(_config.num_layers(read))
    ]
    return tuple(_config.softmax_layer("moe" if moe else "dense", window) for moe in sparse)


class Qwen3MoeFamily(DecoderFamily):
    model_types = ("qwen3_moe",)
    TINY = TINY

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        read = ConfigReader(raw, "config.json")
        hidden = read.read("hidden_size", int)
        activation = _config.activation_name(read)
        moe = MoESpec(
            num_experts=_config.num_experts(read, "num_experts", "num_local_experts"),
            top_k=read.read("num_experts_per_tok", int, "num_experts_per_token"),
            expert_size=read.read("moe_intermediate_size", int),
            norm_topk=read.read("norm_topk_prob", bool, default=False),
            activation=Activation(activation),
        )
        read.require(0 < moe.top_k <= moe.num_experts, "num_experts_per_tok must be 1..num_experts")
        layers = _layers(read, moe.num_experts)
        has_dense = any(layer.mlp == "dense" for layer in layers)
        config = ModelConfig(
            family="qwen3_moe",
            vocab_size=read.read("vocab_size", int),
            hidden_size=hidden,
            layers=layers,
            max_position=_config.max_position(read, 32768),
            norm_eps=read.read("rms_norm_eps", float, default=1e-6),
            tie_embeddings=read.read("tie_word_embeddings", bool, default=False),
            dtype=_config.dtype_name(raw),
            eos_ids=_config.eos_ids(raw),
            moe=moe,
            attention=_config.attention_spec(read, hidden),
            dense_size=read.read("intermediate_size", int) if has_dense else 0,
            activation=activation,
        )
        read.finish()
        return config


FAMILY = Qwen3MoeFamily()
