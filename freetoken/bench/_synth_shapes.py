"""config.json of each geometry that a synthetic checkpoint can have, at full size or tiny.

Owns published hyperparameters. Which tensors a config means is its family's knowledge; only how a family
names its router and whether it stacks its experts stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.bench.geometries import GEOMETRIES, geometry
from freetoken.core.errors import ConfigError

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
}
_QWEN36: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
_TINY: Mapping[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
"""What --tiny makes of any geometry; experts follow in `_TINY_EXPERTS` where a config has the key."""
_TINY_EXPERTS: Mapping[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 16,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_TINY_TOP_K = 4


@dataclass(frozen=True)
class Recipe:
    """What a geometry's files look like.

    router   the tensor name of the router, without `.weight`
    stacked  one tensor holds all experts of a layer, biases beside them; else three tensors an expert
    formats  of experts
    """

    config: Mapping[str, Any]
    router: str = "mlp.gate"
    stacked: bool = False
    formats: tuple[str, ...] = ("bf16", "fp8", "mxfp4", "nvfp4", "int4")


_RECIPES: Mapping[str, Recipe] = {
    "qwen3-30b-a3b": Recipe(_QWEN3),
    "qwen3.6-35b-a3b": Recipe(_QWEN36),
    "gpt-oss-120b": Recipe(_GPT_OSS, "mlp.router", stacked=True, formats=("bf16", "mxfp4")),
}
NAMES = tuple(_RECIPES)
FORMATS = tuple(dict.fromkeys(f for recipe in _RECIPES.values() for f in recipe.formats))
DEFAULT = NAMES[0]


def recipe(name: str, fmt: str | None) -> tuple[Recipe, str]:
    """The recipe of a geometry, and the experts' format (default: the geometry's own)."""
    base = next((known for known in NAMES if name == known or name.startswith(known + "-")), "")
    if not base:
        geometry(name)  # an unknown name is told so
        raise ConfigError(
            f"No model family here computes {name}; synthetic checkpoints: {', '.join(NAMES)}.",
            code="unknown_choice",
        )
    if name != base:
        geometry(name)
    found = _RECIPES[base]
    chosen = fmt or GEOMETRIES[name].format
    if chosen not in found.formats:
        raise ConfigError(
            f"{base} is not published with experts in {chosen}, and has no tensor names for them.",
            code="unknown_choice",
            hint=f"--format is one of: {', '.join(found.formats)}.",
        )
    return found, chosen


def config_of(found: Recipe, layers: int | None, *, tiny: bool) -> dict[str, Any]:
    """config.json without what the text side adds."""
    raw = {**found.config, "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    if tiny:
        raw |= {key: value for key, value in {**_TINY, **_TINY_EXPERTS}.items() if key in raw}
        raw["num_experts_per_tok"] = _TINY_TOP_K
    if layers is not None:
        raw["num_hidden_layers"] = layers
    return raw
