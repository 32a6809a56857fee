"""TINY models as GGUF files, the way llama.cpp's converter writes them (checked against it by hand).

An implementation of its own: forward transforms only, from Hugging Face tensors and config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.weights import gguf_files as files

Code = Callable[[str, Tensor], files.Blob]
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen3_5_moe_text": "qwen35moe", "gpt_oss": "gpt-oss",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def f32(name: str, x: Tensor) -> files.Blob:
    return files.plain(x)


def write(
    path: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    code: Code = f32,
    *,
    shards: int = 1,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model; matrices (but norms, router, convolution) are coded by `code(stored name, matrix)`.

    more   further metadata, for example a vocabulary
    """
    plain = ("conv1d", "gate_inp", "ssm_alpha", "ssm_beta", ".bias")
    blobs = {
        name: code(name, x) if x.dim() > 1 and not any(p in name for p in plain) else files.plain(x)
        for name, x in stored(raw, tensors).items()
    }
    head = {**metadata(raw), **(more or {})}
    return (
        files.write_split(path, head, blobs, shards)[0] if shards > 1 else files.write_file(path, head, blobs)
    )


def stored(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, x in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in TOP:
            out[f"{TOP[stem]}.{kind}"] = _shift(raw, name, x)
            continue
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        at = f"blk.{layer}."
        if "mlp.experts" in part and raw["model_type"] == "gpt_oss":
            out |= {f"{at}{k}": v for k, v in _gpt_oss(part, x).items()}
        elif "mlp.experts" in part:
            gate_up = part.endswith("gate_up_proj")
            half = x.shape[1] // 2
            cut = (
                {"ffn_gate_exps": x[:, :half], "ffn_up_exps": x[:, half:]}
                if gate_up
                else {"ffn_down_exps": x}
            )
            out |= {f"{at}{k}.weight": v for k, v in cut.items()}
        elif part.endswith("A_log"):
            out[at + "ssm_a"] = _tile(raw, -x.exp(), 0, 1)
        elif part.endswith("sinks"):
            out[at + "attn_sinks.weight"] = x
        elif part.endswith("dt_bias"):
            out[at + "ssm_dt.bias"] = _tile(raw, x, 0, 1)
        else:
            out[at + _name(raw, part)] = _part(raw, part, x)
    return out


def _gpt_oss(part: str, x: Tensor) -> dict[str, Tensor]:
    """Gate and up take turns; plain matrices are transposed."""
    kind = "bias" if part.endswith("_bias") else "weight"
    x = x if kind == "bias" else x.mT
    if "down_proj" in part:
        return {f"ffn_down_exps.{kind}": x}
    return {f"ffn_gate_exps.{kind}": x[:, 0::2], f"ffn_up_exps.{kind}": x[:, 1::2]}


def _name(raw: Mapping[str, Any], part: str) -> str:
    stem, _, kind = part.rpartition(".")
    after = "post_attention_norm" if raw["model_type"] in ("qwen3_5_moe_text", "gpt_oss") else "ffn_norm"
    return f"{({**NAMES, 'post_attention_layernorm': after})[stem]}.{kind}"


def _part(raw: Mapping[str, Any], part: str, x: Tensor) -> Tensor:
    if raw["model_type"] == "llama" and part.split(".")[1] in ("q_proj", "k_proj"):
        heads = raw["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
        return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if part.startswith("linear_attn."):
        return _delta(raw, part.removeprefix("linear_attn."), x)
    x = _shift(raw, part, x)
    return x.squeeze(0) if "shared_expert_gate" in part else x


def _delta(raw: Mapping[str, Any], part: str, x: Tensor) -> Tensor:
    width, keys = raw["linear_value_head_dim"], 2 * raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
    if part.startswith(("in_proj_qkv", "conv1d")):
        x = x.squeeze(1) if "conv1d" in part else x
        return torch.cat([x[:keys], _tile(raw, x[keys:], 0, width)])
    if part.startswith("in_proj_z"):
        return _tile(raw, x, 0, width)
    if part.startswith(("in_proj_a", "in_proj_b")):
        return _tile(raw, x, 0, 1)
    return _tile(raw, x, 1, width) if part.startswith("out_proj") else x


def _tile(raw: Mapping[str, Any], x: Tensor, axis: int, width: int) -> Tensor:
    """Value heads by key head -> the first of every key head, then the second, and so on."""
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    split = x.unflatten(axis, (keys, values // keys, width)).transpose(axis, axis + 1)
    return split.flatten(axis, axis + 2)


def _shift(raw: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
    return x + 1.0 if raw["model_type"] == "qwen3_5_moe_text" and name.endswith("norm.weight") else x


def metadata(raw: Mapping[str, Any]) -> dict[str, Any]:
    arch = ARCHITECTURES[raw["model_type"]]
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    rope = raw["rope_parameters"]
    own = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": raw.get("num_experts") or raw.get("num_local_experts"),
        "expert_used_count": raw.get("num_experts_per_tok"),
        "expert_feed_forward_length": raw.get("moe_intermediate_size") or raw.get("intermediate_size"),
        "attention.sliding_window": raw.get("sliding_window"),
        "expert_shared_feed_forward_length": raw.get("shared_expert_intermediate_size"),
        "ssm.conv_kernel": raw.get("linear_conv_kernel_dim"),
        "ssm.state_size": raw.get("linear_key_head_dim"),
        "ssm.group_count": raw.get("linear_num_key_heads"),
        "ssm.time_step_rank": raw.get("linear_num_value_heads"),
    }
    if "linear_value_head_dim" in raw:
        own["ssm.inner_size"] = raw["linear_value_head_dim"] * raw["linear_num_value_heads"]
    if rope.get("rope_type") in ("yarn", "linear"):
        own["rope.scaling.type"], own["rope.scaling.factor"] = rope["rope_type"], float(rope["factor"])
        own["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    special = {"tokenizer.ggml.eos_token_id": raw["eos_token_id"]}
    named = {f"{arch}.{key}": x for key, x in own.items() if x is not None}
    return {"general.architecture": arch, **named, **special}
