"""A synthetic checkpoint on disk: a shard of what stands alone, then a shard a layer.

Owns which tensor lies where and the amplitudes that experts need. A piece (one expert, or a layer's dense
tensors) is made in the thread that writes it, so no more than a few pieces are ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from freetoken.bench import _synth_weights as weights
from freetoken.bench._synth_codes import CODINGS, STACKED, Bytes, Coding, Lift, Noise, Tensor
from freetoken.bench._synth_files import Shard
from freetoken.bench._synth_shapes import Recipe
from freetoken.bench._synth_text import Walk
from freetoken.core.model_config import ModelConfig
from freetoken.kernels.activation import gated
from freetoken.models import _tensors

Pieces = list[tuple[int, Bytes]]
WRITTEN = 1.0
"""Wished rms of what experts leave in their layer's dimensions, beside a token's own signal of 1."""
ROWS = 8192
"""Of embedding and head that are made at a time."""
_ROUTE_SPREAD = 1.15
"""Root of the sum of squared route weights over that of equal ones; a typical softmax of the top few."""


@dataclass(frozen=True)
class Amplitudes:
    """Spreads of gate and up, and of down, as wished; and what down's makes experts leave behind."""

    inner: float
    down: float
    written: float


def coding_of(recipe: Recipe, fmt: str) -> Coding:
    return (STACKED if recipe.stacked else CODINGS)[fmt]


def amplitudes(config: ModelConfig, coding: Coding) -> Amplitudes:
    """Amplitudes that a format can have, nearest to those wished."""
    moe = config.moe
    assert moe is not None
    hidden, size = config.hidden_size, moe.expert_size
    flat = np.zeros(size, np.int64)
    inner = 1 / math.sqrt(hidden)
    real = coding.matrix(size, hidden, inner, flat)[1] * math.sqrt(hidden)
    g = torch.Generator().manual_seed(0)
    made = gated(moe.activation, *(real * torch.randn(1 << 16, generator=g) for _ in range(2)))
    gain = float(made.square().mean().sqrt()) * math.sqrt(size) * _ROUTE_SPREAD / math.sqrt(moe.top_k)
    down = WRITTEN / gain
    return Amplitudes(inner, down, gain * coding.matrix(hidden, size, down, np.zeros(hidden, np.int64))[1])


class Checkpoint:
    """Lays out the shards of one synthetic model."""

    def __init__(self, recipe: Recipe, coding: Coding, plan: weights.Plan, sizes: Amplitudes) -> None:
        self._recipe, self._coding, self.plan, self._sizes = recipe, coding, plan, sizes
        self._noise = Noise(plan.seed)

    def shards(self, walk: Walk) -> list[Shard]:
        plan = self.plan
        shapes = _tensors.expected(plan.config, lambda layer: {}, self._recipe.router)
        top = Shard()
        words = weights.Words(plan, walk)
        makers = {"model.embed_tokens.weight": words.embedding, "lm_head.weight": words.head}
        for name, shape in shapes.items():
            if ".layers." in name:
                continue
            at = top.add(name, "BF16", shape)
            if name in makers:
                top.pieces += [self.rows(makers[name], at, rows) for rows in cuts(shape[0])]
            else:
                norm = torch.full(shape, plan.norm_one, dtype=torch.bfloat16)
                top.pieces.append(partial(_placed, {name: at}, {name: norm}))
        return [top, *(self._layer(layer, shapes) for layer in range(plan.config.num_layers))]

    def rows(self, make: Callable[[slice], torch.Tensor], at: int, rows: slice) -> Callable[[], Pieces]:
        """A piece: some rows of a matrix that begins at `at`."""
        return partial(_rows, make, at, rows)

    def _layer(self, layer: int, shapes: Mapping[str, tuple[int, ...]]) -> Shard:
        shard, at = Shard(), _tensors.prefix(layer)
        mine = {name[len(at) :]: shape for name, shape in shapes.items() if name.startswith(at)}
        places = {name: shard.add(at + name, "BF16", shape) for name, shape in mine.items()}

        def dense() -> Pieces:
            return [
                piece
                for number, (name, shape) in enumerate(mine.items())
                for piece in _placed(
                    {name: places[name]},
                    {name: weights.dense_tensor(self.plan, name, shape, layer, number)},
                )
            ]

        shard.pieces.append(dense)
        moe_layer = self.plan.config.moe_layer_of[layer]
        if moe_layer >= 0:
            add = self._stacked if self._recipe.stacked else self._split
            add(shard, at + "mlp.experts.", moe_layer)
        return shard

    def matrices(self, moe_layer: int) -> Iterator[tuple[str, list[Tensor]]]:
        """An expert's matrices by short name."""
        moe, hidden = self.plan.config.moe, self.plan.config.hidden_size
        assert moe is not None
        lift: Lift = np.full(hidden, weights.WEAK, np.int64)
        lift[self.plan.own(moe_layer)] = 0
        inner, down = self._sizes.inner, self._sizes.down
        rows = {"gate_up_proj": 2 * moe.expert_size}
        if not self._recipe.stacked:
            rows = {"gate_proj": moe.expert_size, "up_proj": moe.expert_size}
        for name, count in rows.items():
            yield name, self._coding.matrix(count, hidden, inner, np.zeros(count, np.int64))[0]
        yield "down_proj", self._coding.matrix(hidden, moe.expert_size, down, lift)[0]

    def _split(self, shard: Shard, at: str, moe_layer: int) -> None:
        moe = self.plan.config.moe
        assert moe is not None
        for expert in range(moe.num_experts):
            mine = [
                (shard.add(f"{at}{expert}.{name}{t.suffix}", t.dtype, t.shape), t)
                for name, tensors in self.matrices(moe_layer)
                for t in tensors
            ]
            shard.pieces.append(partial(self.make, mine, (moe_layer, expert)))

    def _stacked(self, shard: Shard, at: str, moe_layer: int) -> None:
        moe, hidden = self.plan.config.moe, self.plan.config.hidden_size
        assert moe is not None
        count, biased = moe.num_experts, {"gate_up_proj_bias": 2 * moe.expert_size, "down_proj_bias": hidden}
        for name, length in biased.items() if moe.bias else ():
            place = shard.add(at + name, "BF16", (count, length))
            shard.pieces.append(partial(_zeros, place, 2 * count * length))
        stacks = [
            (shard.add(at + name + t.suffix, t.dtype, (count, *t.shape)), t)
            for name, tensors in self.matrices(moe_layer)
            for t in tensors
        ]
        for expert in range(count):
            mine = [(start + expert * t.num_bytes, t) for start, t in stacks]
            shard.pieces.append(partial(self.make, mine, (moe_layer, expert)))

    def make(self, tensors: list[tuple[int, Tensor]], where: tuple[int, int]) -> Pieces:
        window = self._noise.window((self.plan.seed, *where))
        return [(at, tensor.make(window)) for at, tensor in tensors]


def cuts(count: int) -> list[slice]:
    return [slice(at, min(at + ROWS, count)) for at in range(0, count, ROWS)]


def _rows(make: Callable[[slice], torch.Tensor], at: int, rows: slice) -> Pieces:
    data = make(rows)
    return _placed({"": at + 2 * rows.start * data.shape[1]}, {"": data})


def _zeros(at: int, count: int) -> Pieces:
    return [(at, np.zeros(count, np.uint8))]


def _placed(places: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> Pieces:
    flat: Callable[[torch.Tensor], Any] = lambda t: t.contiguous().reshape(-1).view(torch.uint8).numpy()  # noqa: E731
    return [(places[name], flat(tensor)) for name, tensor in tensors.items()]
