"""Tiny tables, places and calls for the layer-step of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.kernels.expert_step import COUNTERS, VICTIMS, Call, Io, Place, Table

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


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


def table(
    shape: Shape, policy: str = "two_speed", alpha: float = 1.0, beta: float = 0.0, budget: int = 0
) -> Table:
    total = shape.layers * shape.experts

    def ints(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, value, dtype=dtype, device=shape.device)

    victims = ints(VICTIMS)
    count = min(VICTIMS, shape.slots)
    victims[:count] = torch.arange(1, count + 1)
    split = ints(16, 2)
    split[:] = torch.tensor([round(alpha * 65536), round(beta * 65536)], dtype=torch.int32)
    return Table(
        slot_of=ints(total, value=-1),
        expert_of=ints(shape.slots + 1, value=-1),
        tiles_in=ints(shape.slots + 1),
        fast=ints(total),
        slow=ints(total),
        victims=victims,
        words=ints(16),
        split=split,
        stats=ints(COUNTERS, dtype=torch.int64),
        work=ints(shape.experts, 4, value=-1),
        here=ints(shape.experts),
        usable=ints(1, value=shape.slots + 1),
        ahead=ints(VICTIMS, 4, value=-1),
        budget=ints(1, value=budget),
        policy=policy,
    )


def record_bytes(shape: Shape) -> int:
    return -(-3 * shape.tiles * shape.width * shape.hidden * shape.dtype.itemsize // 4096) * 4096


def places(shape: Shape, seed: int = 0) -> list[Place]:
    generator = torch.Generator().manual_seed(seed)
    size, slots = record_bytes(shape), torch.zeros(shape.slots + 1, record_bytes(shape), dtype=torch.uint8)
    made = []
    for layer in range(shape.layers):
        values = torch.randn(shape.experts, size // shape.dtype.itemsize, generator=generator) * 0.1
        records = values.to(shape.dtype).view(torch.uint8)
        if shape.device != "cpu":
            records = records.pin_memory()
        made.append(
            Place(
                layer=layer,
                num_experts=shape.experts,
                records=records,
                address=records.data_ptr(),
                slots=slots.to(shape.device) if not made else made[0].slots,
                hidden=shape.hidden,
                tile_width=shape.width,
                num_tiles=shape.tiles,
                tile_bytes=3 * shape.width * shape.hidden * shape.dtype.itemsize,
                tiles_offset=0,
                format=NAMES[shape.dtype],
                activation="silu",
            )
        )
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
