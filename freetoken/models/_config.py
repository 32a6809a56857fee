"""Reading config.json facts that the Qwen families spell alike, with every fault reported at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from freetoken.core.model_config import AttentionSpec, ConfigReader, LayerSpec
from freetoken.kernels import activation
from freetoken.layers import rope

MOST_LAYERS, MOST_EXPERTS, MOST_POSITIONS = 4096, 1 << 16, 1 << 24
SHOWN = 8
_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id` may be absent, a number or a list; the tokenizer refuses what can't be a token."""
    value = raw.get("eos_token_id")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in values if isinstance(v, int) and 0 <= v < 1 << 31)


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


def num_layers(read: ConfigReader) -> int:
    return int(read.read("num_hidden_layers", int, most=MOST_LAYERS))


def num_experts(read: ConfigReader, key: str, alias: str) -> int:
    return int(read.read(key, int, alias, most=MOST_EXPERTS))


def max_position(read: ConfigReader, default: int) -> int:
    """Positions that the model knows: one of a prompt, one of an answer at least. A table of them is made."""
    return int(read.read("max_position_embeddings", int, default=default, least=2, most=MOST_POSITIONS))


def layer_types(read: ConfigReader, known: Collection[str], default: list[str]) -> list[str]:
    """One kind a layer; what is not known is a fault and becomes any that is."""
    types = read.read("layer_types", list, default=default)
    good = [isinstance(t, str) and t in known for t in types]
    unknown = sorted({str(t) for t, fine in zip(types, good, strict=True) if not fine})
    read.require(not unknown, f"layer type {', '.join(unknown[:SHOWN])} is not supported")
    return [t if fine else next(iter(known)) for t, fine in zip(types, good, strict=True)]


def rope_facts(read: ConfigReader, partial_default: float) -> tuple[float, float, Mapping[str, Any] | None]:
    """(theta, rotated share of the head, scaling or None), from the new spelling or the old one."""
    new = read.read("rope_parameters", dict, default={})
    scaling = dict(new or read.read("rope_scaling", dict, default={}))
    faults = len(read.faults)
    theta = scaling.get("rope_theta") or read.read("rope_theta", float, default=10000.0)
    partial = scaling.get("partial_rotary_factor")
    if partial is None:
        partial = read.read("partial_rotary_factor", float, default=partial_default)
    read.require(_is_number(theta) and theta > 1, f"rope_theta is {theta!r}, expected a number above 1")
    fits = _is_number(partial) and 0 < partial <= 1
    read.require(fits, f"partial_rotary_factor is {partial!r}, expected a share above 0, at most 1")
    kind = rope.scaling_kind(scaling)
    read.require(
        kind in rope.KINDS, f"rope type {kind!r} is not supported, there are {', '.join(rope.KINDS)}"
    )
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    for key in needed.get(kind, ()):
        read.require(scaling.get(key) is not None, f"rope {kind} needs {key}")
    for key in _ROPE_NUMBERS:
        value = scaling.get(key)
        good = value is None or (_is_number(value) and (value > 0 or (value == 0 and "mscale" in key)))
        read.require(good, f"rope's {key} is {value!r}, expected a number above 0")
    if kind == "factors":
        factors = scaling.get("factors")
        good = isinstance(factors, (list, tuple)) and all(_is_number(f) and f > 0 for f in factors)
        read.require(good and bool(factors), "rope factors needs factors, all of them numbers above 0")
    if kind == "yarn" and not scaling.get("factor"):
        read.require(bool(scaling.get("original_max_position_embeddings")), "rope yarn needs factor")
    if kind == "llama3" and len(read.faults) == faults:
        order = scaling["low_freq_factor"] < scaling["high_freq_factor"]
        read.require(order, "rope llama3's low_freq_factor must be below its high_freq_factor")
    if len(read.faults) > faults:  # whoever goes on reading finds something to count with
        return 10000.0, 1.0, None
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
    check_attention(read, spec)
    return spec


def check_attention(read: ConfigReader, spec: AttentionSpec) -> None:
    """Faults of sizes that don't fit each other; kernels index by them."""
    kv, rotary = spec.num_kv_heads, spec.rotary_dim
    read.require(spec.num_heads > 0 and spec.head_dim > 0, "attention without heads")
    read.require(kv > 0 and spec.num_heads % max(kv, 1) == 0, "num_key_value_heads doesn't divide the heads")
    even = 0 < rotary <= spec.head_dim and rotary % 2 == 0
    read.require(even, f"{rotary} of {spec.head_dim} dimensions of a head can't be rotated in pairs")
    factors = (spec.rope_scaling or {}).get("factors")
    count = rotary // 2 if factors is None else len(factors)
    read.require(count == rotary // 2, f"rope has {count} factors for {rotary // 2} pairs")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
