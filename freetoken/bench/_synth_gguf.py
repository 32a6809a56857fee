"""The same synthetic model as one GGUF file in bf16, for engines that read nothing else.

Owns the container's header, its names and the vocabulary's keys. Bytes of matrices are made by the same seeds
as the safetensors', so both hold the same numbers; vectors and routers are float32, as converters write them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freetoken.bench import _synth_weights as weights
from freetoken.bench._synth_codes import Bytes
from freetoken.bench._synth_files import Shard
from freetoken.bench._synth_text import Walk
from freetoken.bench._synth_write import Checkpoint, cuts
from freetoken.core.errors import ConfigError
from freetoken.core.units import align_up
from freetoken.models import _tensors

ARCHITECTURES: Mapping[str, str] = {"qwen3_moe": "qwen3moe"}
_ALIGN = 32
_TYPES = {"F32": 0, "BF16": 30}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5


def check(raw: Mapping[str, Any]) -> None:
    """ConfigError unless this model can be written so."""
    if raw["model_type"] not in ARCHITECTURES or "quantization_config" in raw:
        raise ConfigError(
            "--gguf writes qwen3-30b-a3b with experts in bf16 only.",
            code="unknown_choice",
            hint="Leave --gguf out, or choose that geometry and --format bf16.",
        )


class GgufFile(Shard):
    """A shard whose header is GGUF's."""

    def __init__(self, metadata: bytes, num_keys: int) -> None:
        super().__init__()
        self._metadata, self._num_keys = metadata, num_keys

    def header(self) -> bytes:
        head = struct.pack("<IIQQ", 0x46554747, 3, len(self.entries), self._num_keys) + self._metadata
        for name, entry in self.entries.items():
            shape, start = entry["shape"], entry["data_offsets"][0]
            assert start % _ALIGN == 0, name
            head += _text(name) + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
            head += struct.pack("<IQ", _TYPES[entry["dtype"]], start)
        return head + b"\0" * (align_up(len(head), _ALIGN) - len(head))


def gguf_file(made: Checkpoint, walk: Walk, out: Path, raw: Mapping[str, Any]) -> GgufFile:
    """Lay the file out; `out` holds the vocabulary."""
    plan, config = made.plan, made.plan.config
    keys = _metadata(raw, out)
    file = GgufFile(b"".join(_text(name) + value for name, value in keys.items()), len(keys))
    words = weights.Words(plan, walk)
    makers = {"model.embed_tokens.weight": words.embedding, "lm_head.weight": words.head}
    shapes = _tensors.expected(config, lambda layer: {}, made.plan.router)
    for name, shape in shapes.items():
        if name in makers:
            at = file.add(_TOP[name], "BF16", shape)
            file.pieces += [made.rows(makers[name], at, rows) for rows in cuts(shape[0])]
        elif name in _TOP:
            at = file.add(_TOP[name], "F32", shape)
            file.pieces.append(partial(_ones, at, shape[0]))
    for layer in range(config.num_layers):
        _layer(file, made, layer, shapes)
    return file


def _layer(file: GgufFile, made: Checkpoint, layer: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    prefix, moe = _tensors.prefix(layer), made.plan.config.moe
    assert moe is not None
    mine = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
    for number, (name, shape) in enumerate(mine.items()):
        plain = len(shape) > 1 and not name.startswith(made.plan.router)
        at = file.add(f"blk.{layer}.{_PARTS[name]}", "BF16" if plain else "F32", shape)
        file.pieces.append(partial(_dense, made.plan, (name, shape, layer, number), at, plain))
    stacks = [
        (file.add(f"blk.{layer}.{_EXPERTS[name]}.weight", t.dtype, (moe.num_experts, *t.shape)), t)
        for name, tensors in made.matrices(layer)
        for t in tensors
    ]
    for expert in range(moe.num_experts):
        some = [(start + expert * t.num_bytes, t) for start, t in stacks]
        file.pieces.append(partial(made.make, some, (layer, expert)))


def _dense(
    plan: weights.Plan, what: tuple[str, tuple[int, ...], int, int], at: int, plain: bool
) -> list[tuple[int, Bytes]]:
    tensor = weights.dense_tensor(plan, *what)
    numbers = tensor if plain else tensor.float()
    return [(at, numbers.contiguous().reshape(-1).view(torch.uint8).numpy())]


def _ones(at: int, count: int) -> list[tuple[int, Bytes]]:
    return [(at, np.ones(count, np.float32).view(np.uint8))]


def _metadata(raw: Mapping[str, Any], out: Path) -> dict[str, bytes]:
    """Keys of the architecture and of the vocabulary, coded."""
    a = ARCHITECTURES[raw["model_type"]]
    whole = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "expert_count": raw["num_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
    }
    real = {"rope.freq_base": raw["rope_theta"], "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"]}
    keys = {"general.architecture": _string(a), "general.name": _string("synthetic")}
    keys |= {f"{a}.{name}": struct.pack("<II", _U32, value) for name, value in whole.items()}
    keys |= {f"{a}.{name}": struct.pack("<If", _F32, value) for name, value in real.items()}
    return keys | _vocabulary(out, raw["vocab_size"])


def _vocabulary(out: Path, size: int) -> dict[str, bytes]:
    read = json.loads((out / "tokenizer.json").read_text("utf-8"))
    config = json.loads((out / "tokenizer_config.json").read_text("utf-8"))
    pieces = {number: piece for piece, number in read["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in read["added_tokens"]}
    tokens = [pieces.get(i) or added.get(i) or f"[PAD{i}]" for i in range(size)]
    kinds = [1 if i in pieces else 3 if i in added else 5 for i in range(size)]
    at = "tokenizer.ggml."
    special = {content: number for number, content in added.items()}
    return {
        f"{at}model": _string("gpt2"),
        f"{at}pre": _string("qwen2"),
        f"{at}tokens": _strings(tokens),
        f"{at}token_type": struct.pack("<IIQ", _ARRAY, _I32, size) + struct.pack(f"<{size}i", *kinds),
        f"{at}merges": _strings([" ".join(pair) for pair in read["model"]["merges"]]),
        f"{at}eos_token_id": struct.pack("<II", _U32, special[config["eos_token"]]),
        f"{at}padding_token_id": struct.pack("<II", _U32, special[config["pad_token"]]),
        f"{at}add_bos_token": struct.pack("<I?", _BOOL, False),
        "tokenizer.chat_template": _string(config["chat_template"]),
    }


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _string(text: str) -> bytes:
    return struct.pack("<I", _STRING) + _text(text)


def _strings(texts: list[str]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(map(_text, texts))
