"""Token mixers of the Qwen families: projections, norms and rotation round an attention kind.

A mixer takes the normed hidden state [T, H] and returns its contribution [T, H]; what lasts between
steps belongs to the attention kind. `layer` counts layers of the same kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.attention.full import FullAttention
from freetoken.attention.gated_delta import GatedDelta
from freetoken.core.batch import Batch
from freetoken.core.model_config import ModelConfig
from freetoken.kernels.activation import sigmoid, softplus
from freetoken.layers.linear import Linear
from freetoken.layers.norm import GatedNorm, RMSNorm
from freetoken.layers.rope import Rope
from freetoken.models._tensors import LayerReader


class AttentionMixer:
    """Grouped-query attention; optionally normed q and k, biases, and a sigmoid gate on the output.

    With a gate, q_proj interleaves per head: D query rows, then D gate rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: LayerReader,
        layer: int,
        storage: FullAttention,
        rope: Rope,
        norm_offset: float,
    ) -> None:
        spec = config.attention
        assert spec is not None
        names = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
        biases = [read(name + ".bias") for name in names] if spec.bias else None
        self.qkv = Linear.join([read(name + ".weight") for name in names], biases, exact=read.exact)
        out_bias = read("self_attn.o_proj.bias") if spec.bias else None
        self.out = Linear(read("self_attn.o_proj.weight"), out_bias, exact=read.exact)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(read("self_attn.q_norm.weight"), config.norm_eps, norm_offset)
            self.k_norm = RMSNorm(read("self_attn.k_norm.weight"), config.norm_eps, norm_offset)
        self.spec, self.layer, self.storage, self.rope = spec, layer, storage, rope

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        spec, kv_size = self.spec, self.spec.num_kv_heads * self.spec.head_dim
        query, key, value = self.qkv(x).split([self.qkv.weight.shape[0] - 2 * kv_size, kv_size, kv_size], -1)
        query = query.unflatten(-1, (spec.num_heads, -1))
        gate = query[..., spec.head_dim :]
        query = query[..., : spec.head_dim]
        key = key.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        value = value.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
        if self.q_norm and self.k_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rope(query, batch.positions), self.rope(key, batch.positions)
        mixed = self.storage.attend(self.layer, query, key, value, batch)
        if spec.gated:
            share = sigmoid(gate)
            mixed = (mixed.float() * share).to(x.dtype)
        return self.out(mixed.flatten(1))


class DeltaMixer:
    """Gated DeltaNet: joined input projections, decay and write strength per head, gated output norm."""

    def __init__(self, config: ModelConfig, read: LayerReader, layer: int, storage: GatedDelta) -> None:
        spec = config.delta
        assert spec is not None
        names = ("qkv", "z", "b", "a")
        weights = [read(f"linear_attn.in_proj_{name}.weight") for name in names]
        self.sizes = [len(w) for w in weights]
        self.inputs = Linear.join(weights, exact=read.exact)
        self.conv = read("linear_attn.conv1d.weight", torch.float32).squeeze(1).t().contiguous()
        self.decay = -read("linear_attn.A_log", torch.float32).exp()
        self.dt_bias = read("linear_attn.dt_bias", torch.float32)
        self.norm = GatedNorm(read("linear_attn.norm.weight"), config.norm_eps)
        self.out = Linear(read("linear_attn.out_proj.weight"), exact=read.exact)
        self.spec, self.layer, self.storage = spec, layer, storage

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        qkv, z, b, a = self.inputs(x).split(self.sizes, dim=-1)
        beta = sigmoid(b)
        g = self.decay * softplus(a.float() + self.dt_bias)
        mixed = self.storage.attend(self.layer, qkv, self.conv, g, beta, batch)
        gate = z.unflatten(-1, (self.spec.num_v_heads, self.spec.v_dim))
        return self.out(self.norm.gated(mixed, gate).to(x.dtype).flatten(1))
