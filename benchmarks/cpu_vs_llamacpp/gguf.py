"""The smallest GGUF writer that holds a synthetic qwen3_moe model: header, names, aligned tensors.

The file format: github.com/ggml-org/ggml, docs/gguf.md. No vocabulary: the other engine is given ids.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from benchmarks.cpu_vs_llamacpp.synthetic import GGUF_TYPES, Synthetic

ALIGN = 32
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
}


def write(source: Synthetic, path: Path) -> None:
    """Write the whole model."""
    entries = _entries(source)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(_metadata(source)))
    head += b"".join(_metadata(source))
    at = 0
    for name, shape, kind, size, _ in entries:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _text(name) + dims + struct.pack("<IQ", GGUF_TYPES[kind], at)
        at += -(-size // ALIGN) * ALIGN
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGN))
        for _, _, _, size, parts in entries:
            for part in parts:
                out.write(source.raw(part).numpy().data)
            out.write(bytes(-size % ALIGN))


def _entries(source: Synthetic) -> list[tuple[str, tuple[int, ...], str, int, list[str]]]:
    """(name, shape, format, bytes, the tensors it is made of) of every tensor."""
    made = [(name, [ours]) for name, ours in _TOP.items()]
    for layer in range(source.geometry.layers):
        at = f"model.layers.{layer}."
        made += [(f"blk.{layer}.{name}.weight", [f"{at}{ours}.weight"]) for name, ours in _BLOCK.items()]
        for part in ("gate", "up", "down"):
            experts = range(source.geometry.experts)
            parts = [f"{at}mlp.experts.{e}.{part}_proj.weight" for e in experts]
            made.append((f"blk.{layer}.ffn_{part}_exps.weight", parts))
    out = []
    for name, parts in made:
        shape, kind = source.shape(parts[0]), source.kind(parts[0])
        size = _bytes(shape, kind) * len(parts)
        out.append((name, (len(parts), *shape) if len(parts) > 1 else shape, kind, size, parts))
    return out


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    count = 1
    for n in shape:
        count *= n
    sizes: dict[str, Callable[[int], int]] = {
        "f32": lambda n: 4 * n,
        "bf16": lambda n: 2 * n,
        "q8_0": lambda n: n // 32 * 34,
        "q4_k": lambda n: n // 256 * 144,
    }
    return sizes[kind](count)


def _metadata(source: Synthetic) -> list[bytes]:
    one = source.geometry
    numbers = {
        "block_count": one.layers,
        "context_length": one.context,
        "embedding_length": one.hidden,
        "feed_forward_length": one.expert_size,
        "attention.head_count": one.heads,
        "attention.head_count_kv": one.kv_heads,
        "attention.key_length": one.head_dim,
        "attention.value_length": one.head_dim,
        "expert_count": one.experts,
        "expert_used_count": one.top_k,
        "expert_feed_forward_length": one.expert_size,
        "vocab_size": one.vocab,
    }
    reals = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    return [
        _text("general.architecture") + struct.pack("<I", 8) + _text("qwen3moe"),
        _text("tokenizer.ggml.model") + struct.pack("<I", 8) + _text("no_vocab"),
        *(_text(f"qwen3moe.{k}") + struct.pack("<II", 4, v) for k, v in numbers.items()),
        *(_text(f"qwen3moe.{k}") + struct.pack("<If", 6, v) for k, v in reals.items()),
    ]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
