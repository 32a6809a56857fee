"""Token mixers of the Qwen families: projections, norms and rotation round an attention kind.

A mixer takes the hidden state [T, H] and its norm and returns the hidden state after it; what lasts between
steps belongs to the attention kind. `layer` counts layers of the same kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.attention.full import FullAttention, Softmax
from freetoken.attention.gated_delta import GatedDelta
from freetoken.attention.sliding import SlidingAttention
from freetoken.core.batch import Batch
from freetoken.core.model_config import ModelConfig
from freetoken.kernels.delta_decode import Inputs, Layer
from freetoken.kernels.gating import sigmoid_mul
from freetoken.kernels.rope_store import Heads
from freetoken.layers.norm import RMSNorm
from freetoken.layers.rope import Rope
from freetoken.models._tensors import LayerReader


class AttentionMixer:
    """Grouped-query attention; optionally normed q and k, biases, sinks, and a sigmoid gate on the output.

    With a gate, q_proj interleaves per head: D query rows, then D gate rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: LayerReader,
        layer: int,
        storage: FullAttention | SlidingAttention,
        rope: Rope,
        norm_offset: float,
    ) -> None:
        spec = config.attention
        assert spec is not None
        self.qkv = read.product(*(f"self_attn.{part}_proj" for part in ("q", "k", "v")), biased=spec.bias)
        self.out = read.product("self_attn.o_proj", biased=spec.out_bias)
        norms: tuple[Tensor, Tensor, float] | None = None
        if spec.qk_norm:
            both = [RMSNorm(read(f"self_attn.{x}_norm.weight"), config.norm_eps, norm_offset) for x in "qk"]
            norms = (both[0].weight, both[1].weight, config.norm_eps)
        self.heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.gated)
        sinks = read("self_attn.sinks", torch.float32) if spec.sinks else None
        window = config.layers[read.layer].window
        self.kind = Softmax(self.heads, norms, rope.tables, window, sinks)
        self.layer, self.storage = layer, storage

    def __call__(self, h: Tensor, norm: RMSNorm, batch: Batch) -> Tensor:
        """h + attention of the normed h."""
        qkv = self.qkv.after(norm, h)
        mixed = self.storage.mix(self.layer, qkv, self.kind, batch)
        if self.heads.gated:
            width = 2 * self.heads.num * self.heads.dim
            gate = qkv[:, :width].unflatten(-1, (self.heads.num, -1))[..., self.heads.dim :]
            mixed = sigmoid_mul(mixed, gate)
        return self.out.add_to(h, mixed.flatten(1))


class DeltaMixer:
    """Gated DeltaNet: joined input projections, decay and write strength per head, gated output norm."""

    def __init__(self, config: ModelConfig, read: LayerReader, layer: int, storage: GatedDelta) -> None:
        spec = config.delta
        assert spec is not None
        self.sizes = [spec.conv_dim, spec.num_v_heads * spec.v_dim, spec.num_v_heads, spec.num_v_heads]
        self.inputs = read.product(*(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")))
        self.weights = Layer(
            conv=read("linear_attn.conv1d.weight", torch.float32).squeeze(1).t().contiguous(),
            decay=-read("linear_attn.A_log", torch.float32).exp(),
            dt_bias=read("linear_attn.dt_bias", torch.float32),
            norm=read("linear_attn.norm.weight", torch.float32),
            eps=config.norm_eps,
            activation=config.activation,
            heads=(spec.num_k_heads, spec.k_dim, spec.num_v_heads, spec.v_dim),
        )
        self.out = read.product("linear_attn.out_proj")
        self.layer, self.storage = layer, storage

    def __call__(self, h: Tensor, norm: RMSNorm, batch: Batch) -> Tensor:
        """h + the mixed values of the normed h."""
        inputs = Inputs(*self.inputs.after(norm, h).split(self.sizes, dim=-1))
        return self.out.add_to(h, self.storage.attend(self.layer, inputs, self.weights, batch))
