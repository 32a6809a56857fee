"""Tiny expert models: random geometries, filled banks, routings, and the plain answer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.core.interfaces import ExpertBackend, Numerics, Routing
from freetoken.core.model_config import LayerSpec, ModelConfig, MoESpec
from freetoken.core.weights import WeightFormat
from freetoken.experts import bank as banks
from freetoken.experts.bank import ExpertBank
from freetoken.experts.rows import padded_rows
from freetoken.kernels.expert_mlp import expert_mlp
from freetoken.quant.bf16 import FORMAT


def config(
    layers: int = 2, experts: int = 8, top_k: int = 2, hidden: int = 32, width: int = 32
) -> ModelConfig:
    return ModelConfig(
        family="tiny",
        vocab_size=16,
        hidden_size=hidden,
        layers=tuple(LayerSpec("full", "moe") for _ in range(layers)),
        max_position=64,
        norm_eps=1e-6,
        tie_embeddings=True,
        dtype="bfloat16",
        eos_ids=(0,),
        moe=MoESpec(num_experts=experts, top_k=top_k, expert_size=width),
    )


@dataclass
class Tiny:
    """A filled bank with the matrices that went in."""

    config: ModelConfig
    bank: ExpertBank
    weights: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]
    biases: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]

    def reference(self, layer: int, x: Tensor, routing: Routing, exact: bool = False) -> Tensor:
        """Straight from the matrices: per expert, tile by tile, then routes in ascending id."""
        y = torch.zeros(x.shape[0], x.shape[1])
        width = self.bank.layouts[layer].tile_width
        for expert in range(self.bank.num_experts):
            rows, route = torch.nonzero(routing.ids == expert, as_tuple=True)
            if not len(rows):
                continue
            gate, up, down = self.weights[layer, expert]
            m = int(padded_rows(np.array([len(rows)]), exact)[0])
            block = 16 if exact else min(m, 64)
            inputs = torch.zeros(m, x.shape[1], dtype=torch.float32 if exact else x.dtype)
            inputs[: len(rows)] = x[rows]
            out = torch.zeros(m, x.shape[1])
            for b in range(0, m, block):
                for a in range(0, gate.shape[0], width):
                    cut = slice(a, a + width)
                    tile = (gate[cut][None], up[cut][None], down.t()[cut][None].contiguous())
                    part = expert_mlp(inputs[b : b + block], *tile)[0]
                    out[b : b + block] = part if a == 0 else out[b : b + block] + part
            y[rows] = y[rows] + routing.weights[rows, route][:, None] * out[: len(rows)]
        return y


def tiny(model: ModelConfig | None = None, seed: int = 0, fmt: WeightFormat = FORMAT) -> Tiny:
    model = model or config()
    assert model.moe is not None
    draw = torch.Generator().manual_seed(seed)
    bank = banks.create(model, fmt)
    weights, added = {}, {}
    for layer in range(bank.num_layers):
        for expert in range(bank.num_experts):
            wide = (model.moe.expert_size, model.hidden_size)
            made = [torch.randn(wide, generator=draw).bfloat16() * 0.3 for _ in range(3)]
            made[2] = made[2].t().contiguous()
            biases = None
            if model.moe.bias:
                sizes = (model.moe.expert_size, model.moe.expert_size, model.hidden_size)
                a, b, c = (torch.randn(n, generator=draw).bfloat16() for n in sizes)
                biases = added[layer, expert] = (a, b, c)
            bank.put(layer, expert, *made, biases)
            weights[layer, expert] = (made[0], made[1], made[2])
    return Tiny(model, bank, weights, added)


def inputs(
    model: ModelConfig, rows: int, seed: int, dead: int = 0, skew: float = 0.0
) -> tuple[Tensor, Routing]:
    """x [T, H] and a routing of T rows, the last `dead` of them routed nowhere."""
    assert model.moe is not None
    rng = np.random.default_rng(seed)
    e, k = model.moe.num_experts, model.moe.top_k
    share = np.arange(1, e + 1) ** -skew
    ids = np.stack([np.sort(rng.choice(e, k, replace=False, p=share / share.sum())) for _ in range(rows)])
    ids[rows - dead :] = -1
    x = torch.from_numpy(rng.standard_normal((rows, model.hidden_size), dtype=np.float32)).bfloat16()
    weights = torch.from_numpy(rng.random((rows, k), dtype=np.float32))
    return x, Routing(torch.from_numpy(ids.astype(np.int32)), weights)


def drain(
    units: Generator[None, None, Tensor], between: Callable[[int], object] | None = None
) -> tuple[Tensor, int]:
    """What a generator returns and how often it yielded; between() is told the number of the yield."""
    yields = 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, yields
        yields += 1
        if between is not None:
            between(yields)


def stream(
    made: ExpertBackend, x: Tensor, routings: list[Routing], between: Callable[[int], object] | None = None
) -> Tensor:
    """A prompt's x [T, H] through each layer by itself, a routing a layer: [L, T, H]."""
    made.begin_job(len(x))
    outs = [drain(made.stream_layer(i, x, routing), between)[0] for i, routing in enumerate(routings)]
    made.end_job()
    return torch.stack(outs)


NUMERICS = Numerics()
EXACT = Numerics(dtype=torch.float32, exact=True)
