"""Routes sorted by expert on the device: count, place blocks, fill them. A block of the grid is an expert.

An expert takes every row's route to it at most once, so an expert reads the rows in order and counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._triton import Launch, jit, power_of_two, tl
from freetoken.kernels.grouped_mlp._types import Routes

ROWS = 512
"""Rows that a block looks at together, however few there are: one kernel for all prompts."""


@jit
def _hits(ids, first, expert, T, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """(which of BT rows go to the expert, by which route of theirs)."""
    row, rank = first + tl.arange(0, BT), tl.arange(0, KP)
    at = ids + row[:, None] * K + rank[None, :]
    theirs = tl.load(at, mask=(row < T)[:, None] & (rank < K)[None, :], other=-1)
    match = theirs == expert
    return tl.sum(match.to(tl.int32), 1), tl.sum(tl.where(match, rank[None, :], 0), 1)


@jit(varying=("T",))
def count_routes(ids, counts, T, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    expert = tl.program_id(0)
    total = 0
    for first in range(0, T, BT):
        hit, _ = _hits(ids, first, expert, T, K, KP, BT)
        total += tl.sum(hit, 0)
    tl.store(counts + expert, total)


@jit
def place_blocks(counts, first, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    expert = tl.arange(0, EP)
    blocks = tl.cdiv(tl.load(counts + expert, mask=expert < E, other=0), BM)
    end = tl.cumsum(blocks, 0)
    tl.store(first + expert, end - blocks, mask=expert < E)
    tl.store(first + E, tl.sum(blocks, 0))


@jit(varying=("T",))
def fill_blocks(
    ids, first, order, place, owner, T, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr
):
    expert = tl.program_id(0)
    start, stop = tl.load(first + expert), tl.load(first + expert + 1)
    at = start * BM
    for row in range(0, T, BT):
        hit, rank = _hits(ids, row, expert, T, K, KP, BT)
        spot = at + tl.cumsum(hit, 0) - 1
        route = (row + tl.arange(0, BT)) * K + rank
        tl.store(order + spot, route, mask=hit == 1)
        tl.store(place + route, spot, mask=hit == 1)
        at += tl.sum(hit, 0)
    line = tl.arange(0, BM)
    for block in range(start, stop):
        spot = block * BM + line
        tl.store(order + spot, tl.zeros([BM], tl.int32) - 1, mask=spot >= at)
        tl.store(owner + block, expert)


def most_blocks(rows: int, top_k: int, experts: int, block: int) -> int:
    """Blocks that routes of `rows` rows to `experts` experts can take, however they are routed."""
    routes = rows * min(top_k, experts)
    return (routes + min(experts, routes) * (block - 1)) // block


def plan(ids: Tensor, num_experts: int, block: int) -> tuple[Routes, list[Launch]]:
    """The routes, and the launches that fill them; ids int32 [T, k] contiguous."""
    rows, top_k = ids.shape

    def ints(count: int) -> Tensor:
        return torch.empty(max(1, count), dtype=torch.int32, device=ids.device)

    blocks = most_blocks(rows, top_k, num_experts, block)
    counts, first = ints(num_experts), ints(num_experts + 1)
    routes = Routes(ids, ints(blocks * block), ints(rows * top_k), first, ints(blocks), block, num_experts)
    consts = {"K": top_k, "KP": power_of_two(top_k), "BT": ROWS}
    every = {"E": num_experts, "EP": power_of_two(num_experts), "BM": block}
    args = (ids, first, routes.order, routes.place, routes.owner, rows)
    return routes, [
        Launch(count_routes, (num_experts,), (ids, counts, rows), consts),
        Launch(place_blocks, (1,), (counts, first), every),
        Launch(fill_blocks, (num_experts,), args, consts | {"BM": block}),
    ]
