"""Where a model's parts lie in a GGUF file: canonical name -> piece of a stored tensor.

llama.cpp's converter renames tensors, stacks experts, pairs rotated rows (`llama`), and for DeltaNet
tiles the value heads, adds one to norms and stores -exp(A_log). A piece says how to undo that; rows of
blocks are reordered whole, so codes stay codes. Tables only: knows no file and reads no byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freetoken.weights.gguf import GgufTensor

Config = Mapping[str, Any]
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_WHOLE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "attn_sinks.weight": "self_attn.sinks",
}
_EXPERTS = {
    "ffn_gate_exps": ("gate",),
    "ffn_up_exps": ("up",),
    "ffn_down_exps": ("down",),
    "ffn_gate_up_exps": ("gate", "up"),
}
_RENAMED = {"gpt-oss": {"mlp.gate": "mlp.router"}}
"""What an architecture's family calls otherwise."""
_UNUSED = re.compile(r"^(rope_freqs|rope_factors_\w+)\.weight$|\.attn_rot_embd\b")


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + count) of a stored tensor, as a tensor of `shape`.

    order     int64 [count]: row i of the piece is stored as row order[i]; None = as they lie
    columns   int64 [K]: stored column j meets input columns[j]; None = in order
    fix       what turns stored numbers into the checkpoint's, for plain tensors
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    start: int = 0
    order: Tensor | None = None
    columns: Tensor | None = None
    fix: Callable[[Tensor], Tensor] | None = None


def pieces(tensors: Mapping[str, GgufTensor], architecture: str, config: Config) -> dict[str, Piece]:
    """Every part by its canonical name; unknown ones keep their own, what text doesn't need is left out."""
    out: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        match = _BLOCK.match(name)
        if _UNUSED.search(name) or (match and int(match[1]) >= config["num_hidden_layers"]):
            continue
        if match and (parts := _EXPERTS.get(match[2].rpartition(".")[0])):
            out |= _experts(f"model.layers.{match[1]}.mlp.experts.", tensor, parts)
        else:
            known = _canonical(name, match, _RENAMED.get(architecture, {}))
            out[known] = _UNDO.get(architecture, _plain)(known, tensor, config)
    return out


def _canonical(name: str, match: re.Match[str] | None, renamed: Mapping[str, str]) -> str:
    stem, _, kind = (match[2] if match else name).rpartition(".")
    if match is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    at = f"model.layers.{match[1]}."
    if match[2] in _WHOLE:
        return at + _WHOLE[match[2]]
    part = _PARTS.get(stem)
    return f"{at}{renamed.get(part, part)}.{kind}" if part else name


def _experts(at: str, tensor: GgufTensor, parts: tuple[str, ...]) -> dict[str, Piece]:
    """A stack [E, rows, K] as E matrices, or twice as many if gate and up lie together; biases [E, rows]."""
    if tensor.name.endswith(".bias") and len(tensor.shape) == 2 and len(parts) == 1:
        return {
            f"{at}{expert}.{parts[0]}_proj.bias": Piece(tensor, tensor.shape[1:], expert)
            for expert in range(tensor.shape[0])
        }
    if len(tensor.shape) != 3 or tensor.shape[1] % len(parts) or not tensor.name.endswith(".weight"):
        return {tensor.name: Piece(tensor, tensor.shape)}
    count, rows, width = tensor.shape
    size = rows // len(parts)
    return {
        f"{at}{expert}.{part}_proj.weight": Piece(tensor, (size, width), expert * rows + i * size)
        for expert in range(count)
        for i, part in enumerate(parts)
    }


def _plain(name: str, tensor: GgufTensor, config: Config) -> Piece:
    return Piece(tensor, tensor.shape)


def _llama(name: str, tensor: GgufTensor, config: Config) -> Piece:
    """Rotated rows come in pairs (j, j + D / 2); here the two halves of a head follow each other."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2], 0)
    rows = tensor.shape[0]
    if not count or rows % (2 * count):
        return _plain(name, tensor, config)
    order = torch.arange(rows).view(count, rows // count // 2, 2).transpose(1, 2).flatten()
    return Piece(tensor, tensor.shape, order=order)


def _delta(name: str, tensor: GgufTensor, config: Config) -> Piece:
    """Qwen3.5: norms lose their one, A_log its exponential, value heads go back to their key's side."""
    part = name.split(".", 3)[-1]
    if name.endswith("norm.weight") and part != "linear_attn.norm.weight":
        return Piece(tensor, tensor.shape, fix=lambda x: x - 1.0)
    if part == "mlp.shared_expert_gate.weight":
        return Piece(tensor, (1, tensor.shape[-1]))
    if not part.startswith("linear_attn.") or part == "linear_attn.norm.weight":
        return _plain(name, tensor, config)
    return _value_heads(part.removeprefix("linear_attn."), tensor, config)


def _value_heads(part: str, tensor: GgufTensor, config: Config) -> Piece:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, fix, shape = config["linear_value_head_dim"], None, tensor.shape
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        width = 1
    if part == "A_log":
        fix = lambda x: (-x).log()  # noqa: E731 - a name would say no more
    before = 0
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config["linear_key_head_dim"]
    if part == "conv1d.weight":
        shape = (tensor.shape[0], 1, *tensor.shape[1:])
    grouped = torch.arange(values * width).view(values // keys, keys, width).transpose(0, 1).flatten()
    if part == "out_proj.weight":
        columns = torch.empty_like(grouped)
        columns[grouped] = torch.arange(len(grouped))
        return Piece(tensor, shape, columns=columns)
    order = torch.cat([torch.arange(before), before + grouped])
    return Piece(tensor, shape, order=order if len(order) == tensor.shape[0] else None, fix=fix)


_UNDO = {"llama": _llama, "qwen35moe": _delta}
