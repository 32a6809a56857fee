"""The decoder that the Qwen families share: norm, mixer, residual; norm, experts or MLP, residual.

A family differs by its config, its tensor names and `norm_offset` (1.0 where norm weights are stored
around zero); it has checked the tensors before. Every part tells the device what it costs; experts are
charged by who computes them.
Invariant: a forward reads no device value on the host and keeps nothing but pages and states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.attention import full, gated_delta, sliding
from freetoken.core import cost
from freetoken.core.batch import Batch
from freetoken.core.errors import ConfigError
from freetoken.core.interfaces import (
    Device,
    ExpertBackend,
    Model,
    Numerics,
    Pool,
    Routing,
    StateSpec,
    WeightSource,
)
from freetoken.core.model_config import ModelConfig
from freetoken.kernels.gating import add_routed, widen
from freetoken.layers.embedding import Embedding
from freetoken.layers.linear import placed, stack
from freetoken.layers.mlp import GatedMLP
from freetoken.layers.moe import Router, SharedExpert
from freetoken.layers.norm import RMSNorm
from freetoken.layers.rope import Rope
from freetoken.models._mixers import AttentionMixer, DeltaMixer
from freetoken.models._tensors import ROUTER, LayerReader

WIDEST_RING = 1024
"""Tokens. Some forty requests and checkpoints with such a ring hold what one page pool of 40k tokens does."""


def place_windows(config: ModelConfig, wish: str) -> tuple[ModelConfig, str]:
    """Where windowed layers keep their keys and values, and why: `ModelFamily.place_windows`.

    A ring a request costs the window once and resumes at checkpoints; pages cost every token of the context
    and resume anywhere. Wide windows would make each request pay for a context that it may never have, and
    without a layer in pages there is nothing to hang checkpoints on.
    """
    if not config.num_mixers(sliding.KIND):
        return config, ""
    window, lonely = sliding.window_of(config), config.num_mixers(sliding.KIND) == config.num_layers
    if wish == "states" and lonely:
        raise ConfigError(
            "Every layer of this model has a sliding window; they need KV pages.",
            code="invalid_option",
            hint="Leave --window-kv out.",
            param="window_kv",
        )
    if wish == "pages" or (wish == "auto" and (lonely or window > WIDEST_RING)):
        return sliding.in_pages(config), f"windows of {window} tokens lie in the KV pages: resumable anywhere"
    return config, f"windows of {window} tokens are a state of each request: resumable at checkpoints"


def state_specs(config: ModelConfig, page_size: int, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """One spec per mixer kind that the model has: `kv` pages, then `state`."""
    specs = []
    assert not (config.num_mixers(sliding.KIND) and config.num_mixers(gated_delta.KIND)), "one kind a pool"
    if config.attention and config.num_mixers(full.KIND):
        specs.append(full.state_spec(config.attention, config.num_mixers(full.KIND), page_size, dtype))
    if config.attention and (count := config.num_mixers(sliding.KIND)):
        specs.append(sliding.state_spec(config.attention, count, sliding.window_of(config), dtype))
    if config.delta and config.num_mixers(gated_delta.KIND):
        specs.append(gated_delta.state_spec(config.delta, config.num_mixers(gated_delta.KIND), dtype))
    return tuple(specs)


class Decoder(Model):
    """A decoder-only language model with mixers and MLPs chosen per layer.

    router   what the family calls the router's tensors
    """

    router = ROUTER

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        device: Device,
        numerics: Numerics,
        pools: Mapping[str, Pool],
        *,
        norm_offset: float = 0.0,
    ) -> None:
        if numerics.exact and numerics.dtype != torch.float32:
            raise ConfigError(
                f"Exact mode computes in float32, not {numerics.dtype}.",
                hint="Build pools and model with float32.",
            )
        self.config, self.numerics = config, numerics
        self._device, self._offset = device, norm_offset
        place = device.torch_device
        top = LayerReader(source, -1, numerics, place)
        table = top.weight("model.embed_tokens.weight")
        self._embedding = Embedding(placed(table) if config.tie_embeddings else table, numerics.dtype)
        self._final_norm = RMSNorm(top("model.norm.weight"), config.norm_eps, norm_offset)
        head = self._embedding.weight if config.tie_embeddings else top.weight("lm_head.weight")
        self._head = stack([head], [None], exact=numerics.exact, int8=numerics.int8)
        self._make_storage(pools)
        self._mixers: list[AttentionMixer | DeltaMixer] = []
        self._routers: list[Router | None] = []
        self._mlps: list[SharedExpert | GatedMLP | None] = []
        self._norms: list[tuple[RMSNorm, RMSNorm]] = []
        for layer in range(config.num_layers):
            self._add_layer(layer, LayerReader(source, layer, numerics, place))

    def _make_storage(self, pools: Mapping[str, Pool]) -> None:
        config, place = self.config, self._device.torch_device
        self._softmax: dict[str, full.FullAttention | sliding.SlidingAttention] = {}
        if config.attention:
            self._rope = Rope(config.attention, config.max_position, place)
        if config.attention and (count := config.num_mixers(full.KIND)):
            kv = full.FullAttention(config.attention, count, self.numerics, pools["kv"])
            self._softmax[full.KIND] = kv
        if config.attention and (count := config.num_mixers(sliding.KIND)):
            window, states = sliding.window_of(config), pools["state"]
            rings = sliding.SlidingAttention(config.attention, count, window, self.numerics, states)
            self._softmax[sliding.KIND] = rings
        if config.delta and (count := config.num_mixers(gated_delta.KIND)):
            self._state = gated_delta.GatedDelta(config.delta, count, self.numerics, pools["state"])

    def _add_layer(self, layer: int, read: LayerReader) -> None:
        config, moe, index = self.config, self.config.moe, self.config.mixer_index(layer)
        names = ("input_layernorm.weight", "post_attention_layernorm.weight")
        before, after = (RMSNorm(read(name), config.norm_eps, self._offset) for name in names)
        self._norms.append((before, after))
        storage = self._softmax.get(config.layers[layer].mixer)
        if storage is not None:
            self._mixers.append(AttentionMixer(config, read, index, storage, self._rope, self._offset))
        else:
            self._mixers.append(DeltaMixer(config, read, index, self._state))
        if moe is None or config.moe_layer_of[layer] < 0:
            self._routers.append(None)
            self._mlps.append(self._mlp(read, "mlp."))
            return
        gate = read.finite(f"{self.router}.weight")
        bias = read.finite(f"{self.router}.bias") if moe.router_bias else None
        self._routers.append(Router(after, gate, moe.top_k, moe.norm_topk, bias=bias, exact=read.exact))
        shared = SharedExpert(self._mlp(read, "mlp.shared_expert.", gated=True)) if moe.shared_size else None
        self._mlps.append(shared)

    def _mlp(self, read: LayerReader, name: str, *, gated: bool = False) -> GatedMLP:
        parts = [f"{name}{part}_proj" for part in ("gate", "up")]
        if gated:
            parts.append("mlp.shared_expert_gate")
        biased = self.config.dense_bias and not gated
        down = read.product(f"{name}down_proj", biased=biased)
        return GatedMLP(read.product(*parts, biased=biased), down, self.config.activation)

    def embed(self, batch: Batch) -> Tensor:
        return self._embedding(batch.ids)

    def mix(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        out = self._mixers[layer](h, self._norms[layer][0], batch)
        rows = batch.num_live
        lengths = [len(s.token_ids) for s in batch.segments]
        seen = sum(n * c for n, c in zip(lengths, batch.context_len, strict=False)) // max(rows, 1)
        self._device.charge(*cost.mixer(self.config, layer, rows, seen))
        return out

    def route(self, layer: int, h: Tensor, batch: Batch) -> tuple[Tensor, Routing]:
        router = self._routers[layer]
        assert router is not None
        return router(h, batch.live)

    def combine(self, layer: int, h: Tensor, x: Tensor, routed: Tensor) -> Tensor:
        expert = self._mlps[layer]
        shared = expert(x) if isinstance(expert, SharedExpert) else None
        self._device.charge(*cost.shared_expert(self.config, x.shape[0]))
        return add_routed(h, routed, shared)

    def add_experts(self, layer: int, h: Tensor, x: Tensor, experts: ExpertBackend) -> Tensor:
        expert, moe_layer = self._mlps[layer], self.config.moe_layer_of[layer]
        self._device.charge(*cost.shared_expert(self.config, x.shape[0]))
        if not isinstance(expert, SharedExpert):
            return experts.add(moe_layer, h)
        shared = expert(x)  # while the host and the link are busy
        return add_routed(h, experts.finish(moe_layer), shared)

    def dense(self, layer: int, h: Tensor) -> Tensor:
        mlp = self._mlps[layer]
        assert isinstance(mlp, GatedMLP)
        self._device.charge(*cost.dense_mlp(self.config, h.shape[0]))
        return mlp.add_to(h, self._norms[layer][1])

    def head(self, h: Tensor, rows: Tensor | None) -> Tensor:
        some = h if rows is None else h[rows]
        self._device.charge(*cost.head(self.config, some.shape[0]))
        return widen(self._head.after(self._final_norm, some))
