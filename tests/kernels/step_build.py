"""Tiny tables, places and calls for the layer-step of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.core.codes import Coded
from freetoken.core.model_config import Activation
from freetoken.core.weights import WeightFormat
from freetoken.experts.record import layout
from freetoken.kernels.expert_step import Call, Io, Place, Table
from freetoken.kernels.expert_step.triton import plain_record


@dataclass(frozen=True)
class Shape:
    """A small geometry: L layers of E experts, top_k routes, H, I in NT tiles."""

    layers: int = 3
    experts: int = 8
    top_k: int = 2
    hidden: int = 64
    tiles: int = 4
    width: int = 16
    slots: int = 6
    dtype: torch.dtype = torch.float16
    device: str = "cpu"
    fmt: WeightFormat | None = None
    biased: bool = False
    activation: Activation = Activation()

    @property
    def coded(self) -> Coded:
        """The record: of numbers of `dtype`, or of `fmt`'s codes."""
        if self.fmt is None:
            return plain_record(self.dtype, self.hidden, self.width, self.tiles)
        one = layout(self.hidden, self.tiles * self.width, self.fmt, self.width, biased=self.biased)
        gate, up, down = self.fmt.device_code(self.width, self.hidden)
        bias = one.bias_offset if self.biased else 0
        sizes = (self.hidden, self.width, self.tiles, one.tile_bytes, one.tiles_offset)
        return Coded(*sizes, (gate, up, down), bias)


def table(
    shape: Shape, policy: str = "two_speed", alpha: float = 1.0, beta: float = 0.0, budget: int = 0
) -> Table:
    made = Table.empty([shape.tiles] * shape.layers, shape.experts, shape.slots, shape.device, policy)
    made.split[:] = torch.tensor([round(alpha * 65536), round(beta * 65536)], dtype=torch.int32)
    made.budget.fill_(budget)
    return made


def record_bytes(shape: Shape) -> int:
    coded = shape.coded
    return -(-(coded.tiles_offset + coded.num_tiles * coded.tile_bytes) // 4096) * 4096


def records(shape: Shape, generator: torch.Generator) -> Tensor:
    """uint8 [E, record_bytes] of a layer, random."""
    coded, size = shape.coded, record_bytes(shape)
    w, h = shape.width, shape.hidden
    if shape.fmt is None:
        values = torch.randn(shape.experts, size // shape.dtype.itemsize, generator=generator) * 0.1
        return values.to(shape.dtype).view(torch.uint8)
    made = torch.zeros(shape.experts, size, dtype=torch.uint8)
    for record in made:
        if shape.biased:
            record[: 4 * h] = torch.randn(h, generator=generator).view(torch.uint8)
        for number in range(shape.tiles):
            tile = record[coded.tiles_offset + number * coded.tile_bytes :][: coded.tile_bytes]
            parts = (torch.randn(w, h, generator=generator) * 0.1 for _ in range(3))
            shape.fmt.pack_tile(*parts, tile[: shape.fmt.tile_bytes(w, h)])
            if shape.biased:
                biases = torch.randn(2 * w, generator=generator).view(torch.uint8)
                tile[coded.bias_offset : coded.bias_offset + 8 * w] = biases
    return made


def places(shape: Shape, seed: int = 0) -> list[Place]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.zeros(shape.slots + 1, record_bytes(shape), dtype=torch.uint8)
    made: list[Place] = []
    for layer in range(shape.layers):
        there = records(shape, generator)
        if shape.device != "cpu":
            there = there.pin_memory()
        home = slots.to(shape.device) if not made else made[0].slots
        facts = (layer, shape.experts, there, there.data_ptr(), home, shape.coded, shape.activation)
        made.append(Place(*facts))
    return made


def block(shape: Shape, rows: int) -> Io:
    sizes = (shape.experts * 16, rows * shape.top_k * 4, rows * shape.hidden * shape.dtype.itemsize)
    offsets, at = [], 256
    for size in (*sizes, rows * shape.top_k * shape.hidden * 4):
        offsets.append(at)
        at += -(-size // 64) * 64
    raw = torch.zeros(at, dtype=torch.uint8)
    if shape.device != "cpu":
        raw = raw.pin_memory()

    def part(index: int, size: int, dtype: torch.dtype, *form: int) -> Tensor:
        return raw[offsets[index] : offsets[index] + size].view(dtype).view(*form)

    return Io(
        address=raw.data_ptr(),
        bytes=raw,
        request=raw[64:128].view(torch.int32),
        reply=raw[128:192].view(torch.int32),
        poison=raw[192:256].view(torch.int32),
        items=part(0, sizes[0], torch.int32, shape.experts, 4),
        ids=part(1, sizes[1], torch.int32, rows, shape.top_k),
        x=part(2, sizes[2], shape.dtype, rows, shape.hidden),
        out=part(3, rows * shape.top_k * shape.hidden * 4, torch.float32, -1, shape.hidden),
        offsets=(offsets[0], offsets[1], offsets[2], offsets[3]),
    )


def routing(shape: Shape, rows: int, seed: int, dead: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.choice(shape.experts, shape.top_k, replace=False)) for _ in range(rows)])
    if dead:
        ids[-dead:] = -1
    weights = torch.from_numpy(rng.random((rows, shape.top_k), dtype=np.float32))
    return torch.from_numpy(ids.astype(np.int32)).to(shape.device), weights.to(shape.device)


def call(shape: Shape, rows: int, seed: int, runs: int, io: Io | None = None, dead: int = 0) -> Call:
    ids, weights = routing(shape, rows, seed, dead)
    x = torch.randn(rows, shape.hidden, generator=torch.Generator().manual_seed(seed)).to(shape.dtype)
    scratch = torch.full((rows * shape.top_k, runs, shape.hidden), float("nan"), device=shape.device)
    return Call(x.to(shape.device), ids, weights, scratch, io)
