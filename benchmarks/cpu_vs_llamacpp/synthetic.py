"""A qwen3_moe checkpoint that exists in memory only: random weights of a real family's geometry.

Both engines get the same numbers: `Synthetic` is a weight source for ours, and its raw blocks go into a
GGUF file for the other. A matrix depends on its name and the format alone, so nothing is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.weights import CodedMatrix, WeightSource
from freetoken.models.qwen3_moe import FAMILY

GGUF_TYPES = {"f32": 0, "q8_0": 8, "q4_k": 12, "bf16": 30}


@dataclass(frozen=True)
class Geometry:
    """Qwen3-30B-A3B, with fewer layers, experts and words."""

    layers: int = 4
    experts: int = 16
    top_k: int = 8
    hidden: int = 2048
    expert_size: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 16384
    context: int = 4096

    def config(self) -> dict[str, Any]:
        """The config.json."""
        return {
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "rope_theta": 1000000.0,
            "moe_intermediate_size": self.expert_size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "dtype": "bfloat16",
        }


class Synthetic(WeightSource):
    """Matrices in `fmt` (bf16, q8_0 or q4_k); vectors and routers in float32."""

    def __init__(self, geometry: Geometry, fmt: str) -> None:
        from freetoken.models import _tensors

        self.geometry, self.fmt = geometry, fmt
        self.model_config = FAMILY.read_config(geometry.config())
        self._shapes = _tensors.expected(
            self.model_config, lambda layer: _tensors.expert_shapes(self.model_config, fused=False)
        )

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if self.kind(name) == "bf16" else torch.float32

    def kind(self, name: str) -> str:
        """The format of one tensor."""
        plain = len(self._shapes[name]) < 2 or name.endswith("mlp.gate.weight")
        return "f32" if plain else self.fmt

    def coding(self, name: str) -> str:
        kind = self.kind(name)
        return kind if kind not in ("bf16", "f32") else ""

    def raw(self, name: str) -> Tensor:
        """uint8 [rows, bytes] as a GGUF file holds the tensor."""
        shape, kind = self._shapes[name], self.kind(name)
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if kind in ("f32", "bf16"):
            values = torch.empty(shape).normal_(generator=draw)
            values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1.0 + 0.1 * values
            return values.to(self.dtype(name)).view(torch.uint8).view(*shape[:-1], -1)
        size, each = (34, 32) if kind == "q8_0" else (144, 256)
        blocks = torch.randint(0, 256, (shape[0], shape[1] // each, size), dtype=torch.uint8, generator=draw)
        spread = shape[-1] ** -0.5
        if kind == "q8_0":
            _set(blocks, 0, spread / 74)
        else:  # six-bit scales and minima average 31.5, four-bit codes 7.5: zero in the mean
            _set(blocks, 0, spread / 31.5 / 4.6)
            _set(blocks, 2, spread / 31.5 / 4.6 * 7.5)
        return blocks.flatten(1)

    def read(self, name: str) -> Tensor:
        return self.raw(name).view(self.dtype(name)).view(self._shapes[name])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.read(name)[start:stop]

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        made: Mapping[str, Tensor] = choices.load("freetoken.quant", self.fmt).FORMAT.from_gguf(
            self.raw(name)
        )
        return made

    def close(self) -> None:
        pass


def _set(blocks: Tensor, at: int, value: float) -> None:
    blocks[..., at : at + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
