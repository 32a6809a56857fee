"""A GGUF header as the config.json of its model: one table row an architecture.

Families read what they always read; nothing but this file knows the header's keys. Keys that would
change a model's arithmetic in ways no family here computes are refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from freetoken.core.errors import WeightsError, nearest
from freetoken.weights.gguf_split import GgufModel

_MISSING = object()
_FOREIGN = (
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.temperature_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "use_parallel_residual",
    "expert_group_used_count",
)
"""Keys whose values must be absent, zero or one."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class Header:
    """An architecture's keys with their kinds checked; a fault names the file and the key."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.file = model.path.name
        self.architecture = self._value("general.architecture", str, _MISSING)

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        return self._value(f"{self.architecture}.{key}", kind, default)

    def each(self, key: str, default: Any = _MISSING) -> int:
        """A number that may come once a layer, if all that are not zero agree."""
        value = self.model.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return int(self.get(key, int, default))
        some = {v for v in value if v}
        if any(not isinstance(v, int) or isinstance(v, bool) for v in some):
            raise self.fault(f"{self.architecture}.{key} is {value[:8]}, expected int")
        if len(some) != 1:
            raise self.fault(f"{self.architecture}.{key} differs from layer to layer: {value[:8]}")
        return int(some.pop())

    def has(self, name: str) -> bool:
        return name in self.model.tensors

    def fault(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self.file}: {what}.", code="invalid_model_config", hint="Fetch another file of this model."
        )

    def _value(self, key: str, kind: type, default: Any) -> Any:
        value = self.model.metadata.get(key)
        if value is None and default is not _MISSING:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fault(
                f"{key} is {'missing' if value is None else f'{value!r}'}, expected {kind.__name__}"
            )
        return value


def config_of(model: GgufModel) -> dict[str, Any]:
    """config.json for the model. WeightsError `unknown_model_type` or `invalid_model_config`."""
    header = Header(model)
    if header.architecture not in _ARCHITECTURES:
        raise WeightsError(
            f"{header.file} is of architecture {header.architecture!r}; "
            f"read are: {', '.join(_ARCHITECTURES)}.",
            code="unknown_model_type",
            hint=nearest(header.architecture, _ARCHITECTURES)
            or "A model of another kind may work from its safetensors folder.",
        )
    for key in _FOREIGN:
        value = model.metadata.get(f"{header.architecture}.{key}")
        if value not in (None, 0, 1, False):
            raise header.fault(f"{header.architecture}.{key} is {value!r}, which no model here computes with")
    model_type, more = _ARCHITECTURES[header.architecture]
    return {"model_type": model_type, **_common(header), **more(header)}


def generation_of(model: GgufModel) -> dict[str, Any]:
    """generation_config.json: the sampling that the file recommends, and the ids that end an answer."""
    found = {ours: model.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    return {key: value for key, value in found.items() if value is not None} | {"eos_token_id": _ends(model)}


def _ends(model: GgufModel) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (model.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _common(header: Header) -> dict[str, Any]:
    get, model = header.get, header.model
    if not header.has("token_embd.weight") or len(model.tensors["token_embd.weight"].shape) != 2:
        raise WeightsError(
            f"{header.file} has no tensor token_embd.weight.",
            code="missing_tensor",
            hint="This is no complete language model; fetch another file.",
        )
    heads = header.each("attention.head_count")
    hidden = get("embedding_length", int)
    head_dim = get("attention.key_length", int, hidden // max(heads, 1))
    if get("attention.value_length", int, head_dim) != head_dim:
        raise header.fault("keys and values of different lengths are not supported")
    return {
        "vocab_size": model.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": header.each("feed_forward_length", 0),
        "num_hidden_layers": get("block_count", int) - get("nextn_predict_layers", int, 0),
        "num_attention_heads": heads,
        "num_key_value_heads": header.each("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length", int),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": not header.has("output.weight"),
        "rope_parameters": _rope(header, head_dim),
        "eos_token_id": _ends(model),
        "dtype": "bfloat16",
    }


def _rope(header: Header, head_dim: int) -> dict[str, Any]:
    get = header.get
    rotated = get("rope.dimension_count", int, head_dim)
    kind = get("rope.scaling.type", str, "none")
    factor = get("rope.scaling.factor", float, 0.0) or get("rope.scale_linear", float, 0.0)
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": get("rope.freq_base", float, 10000.0),
        "partial_rotary_factor": rotated / max(head_dim, 1),
    }
    if header.has("rope_freqs.weight"):
        tensor = header.model.tensors["rope_freqs.weight"]
        if tensor.type.dtype is not torch.float32 or tensor.shape != (rotated // 2,):
            raise header.fault(f"rope_freqs.weight is {tensor.type.name} {list(tensor.shape)}")
        factors = header.model.rows(tensor, 0, 1).clone().view(torch.float32).flatten().tolist()
        return found | {"rope_type": "factors", "factors": factors}
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return found | {"rope_type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        return found | _yarn(header, factor)
    if kind != "none":
        raise header.fault(f"{header.architecture}.rope.scaling.type is {kind!r}, which is not supported")
    return found


def _yarn(header: Header, factor: float) -> dict[str, Any]:
    get = header.get
    trained = get("rope.scaling.original_context_length", int, 0)
    own = get("rope.scaling.attn_factor", float, 1.0) * get("rope.scaling.yarn_attn_factor", float, 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained or get("context_length", int),
        "beta_fast": get("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": get("rope.scaling.yarn_beta_slow", float, 1.0),
        "attention_factor": own * (0.1 * math.log(factor) + 1.0) if factor > 1 else own,
    }


def _llama(header: Header) -> dict[str, Any]:
    if header.get("expert_count", int, 0):
        raise header.fault("a llama model with experts (Mixtral) is not supported")
    if header.get("rope.dimension_count", int, 0) not in (0, _common(header)["head_dim"]):
        raise header.fault("a llama model that rotates a part of its heads is not supported")
    return {"attention_bias": header.has("blk.0.attn_q.bias"), "mlp_bias": header.has("blk.0.ffn_up.bias")}


def _qwen3(header: Header) -> dict[str, Any]:
    return {"attention_bias": header.has("blk.0.attn_q.bias")}


def _qwen3_moe(header: Header) -> dict[str, Any]:
    if header.get("expert_gating_func", int, 1) != 1 or header.get(
        "expert_weights_scale", float, 1.0
    ) not in (0.0, 1.0):
        raise header.fault("experts that are not weighed by a plain softmax are not supported")
    layers = range(header.get("block_count", int))
    return {
        "num_experts": header.get("expert_count", int),
        "num_experts_per_tok": header.get("expert_used_count", int),
        "moe_intermediate_size": header.get("expert_feed_forward_length", int),
        "norm_topk_prob": bool(header.get("expert_weights_norm", bool, True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if header.has(f"blk.{i}.ffn_gate.weight")],
    }


def _qwen3_5_moe(header: Header) -> dict[str, Any]:
    get, heads = header.get, header.each("attention.head_count")
    layers = range(get("block_count", int) - get("nextn_predict_layers", int, 0))
    whole = [i for i in layers if header.has(f"blk.{i}.attn_q.weight")]
    values = get("ssm.time_step_rank", int)
    gated = False
    if whole:
        query = header.model.tensors[f"blk.{whole[0]}.attn_q.weight"]
        gated = query.shape[0] == 2 * heads * _common(header)["head_dim"]
    return {
        **_qwen3_moe(header),
        "shared_expert_intermediate_size": get("expert_shared_feed_forward_length", int, 0),
        "attn_output_gate": gated,
        "layer_types": ["full_attention" if i in whole else "linear_attention" for i in layers],
        "linear_conv_kernel_dim": get("ssm.conv_kernel", int),
        "linear_key_head_dim": get("ssm.state_size", int),
        "linear_num_key_heads": get("ssm.group_count", int),
        "linear_num_value_heads": values,
        "linear_value_head_dim": get("ssm.inner_size", int) // max(values, 1),
    }


def _gpt_oss(header: Header) -> dict[str, Any]:
    layers = header.get("block_count", int)
    window, pattern = header.get("attention.sliding_window", int), 2
    given = header.model.metadata.get("gpt-oss.attention.sliding_window_pattern", pattern)
    slides = given if isinstance(given, list) else [(i + 1) % max(int(given), 1) != 0 for i in range(layers)]
    rope = _rope(header, header.get("attention.key_length", int))
    return {
        "num_local_experts": header.get("expert_count", int),
        "num_experts_per_tok": header.get("expert_used_count", int),
        "intermediate_size": header.get("expert_feed_forward_length", int),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        # The model was trained with the ramp's ends as they are; GGUF has no key for it.
        "rope_parameters": {**rope, "truncate": False},
    }


_ARCHITECTURES: Mapping[str, tuple[str, Callable[[Header], dict[str, Any]]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", lambda header: {}),
    "qwen3": ("qwen3", _qwen3),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "qwen35moe": ("qwen3_5_moe_text", _qwen3_5_moe),
    "gpt-oss": ("gpt_oss", _gpt_oss),
}
"""Architecture -> our model type, and what its config says besides the common part."""
