"""Reading config.json facts that the Qwen families spell alike, with every fault reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.core.model_config import AttentionSpec, ConfigReader, LayerSpec
from freetoken.kernels import activation
from freetoken.layers import rope


def eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` may be absent, a number or a list."""
    value = raw.get("eos_token_id")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in values if isinstance(v, int))


def dtype_name(raw: Mapping[str, Any]) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def activation_name(read: ConfigReader) -> str:
    name = str(read.read("hidden_act", str, default="silu"))
    read.require(
        name in activation.NAMES, f"hidden_act {name!r} is unknown, there are {', '.join(activation.NAMES)}"
    )
    return name


def softmax_layer(mlp: str, window: int | None = None) -> LayerSpec:
    """A layer of softmax attention over all tokens, or the last `window` ones."""
    return LayerSpec("sliding" if window else "full", mlp, window)


def rope_facts(read: ConfigReader, partial_default: float) -> tuple[float, float, Mapping[str, Any] | None]:
    """(theta, rotated share of the head, scaling or None), from the new spelling or the old one."""
    new = read.read("rope_parameters", dict, default={})
    scaling = dict(new or read.read("rope_scaling", dict, default={}))
    theta = scaling.get("rope_theta") or read.read("rope_theta", float, default=10000.0)
    partial = scaling.get("partial_rotary_factor")
    if partial is None:
        partial = read.read("partial_rotary_factor", float, default=partial_default)
    kind = rope.scaling_kind(scaling)
    read.require(
        kind in rope.KINDS, f"rope type {kind!r} is not supported, there are {', '.join(rope.KINDS)}"
    )
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    for key in needed.get(kind, ()):
        read.require(isinstance(scaling.get(key), (int, float)), f"rope {kind} needs {key}")
    if kind == "factors":
        read.require(bool(scaling.get("factors")), "rope factors needs factors")
    if kind == "yarn" and not scaling.get("factor"):
        read.require(bool(scaling.get("original_max_position_embeddings")), "rope yarn needs factor")
    return float(theta), float(partial), None if kind == "default" else scaling


def attention_spec(
    read: ConfigReader,
    hidden: int,
    *,
    head_dim: int = 0,
    partial: float = 1.0,
    biased: bool = False,
    **facts: Any,
) -> AttentionSpec:
    """Softmax attention as configs spell it, with defaults where they are silent.

    `facts` are fields of the spec that the family knows by itself; a bias among them isn't read.
    """
    heads = read.read("num_attention_heads", int)
    head_dim = read.read("head_dim", int, default=head_dim or hidden // max(heads, 1))
    theta, share, scaling = rope_facts(read, partial_default=partial)
    if "bias" not in facts:
        facts["bias"] = facts["out_bias"] = read.read("attention_bias", bool, default=biased)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read.read("num_key_value_heads", int, default=heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        rope_theta=theta,
        rope_scaling=scaling,
        **facts,
    )
    read.require(heads % max(spec.num_kv_heads, 1) == 0, "num_key_value_heads doesn't divide the heads")
    return spec
