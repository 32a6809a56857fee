"""Grouped products over tile records: gate and up with the activation between, then down, then the sum.

A block of the grid owns BM routes of one expert and BN columns. Where a column or row of a weight lies
follows from the tile width; a row's H numbers are contiguous in all three matrices. The grid is as large
as routing could ever need; blocks that routing didn't use return at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._gate import gate_consts, gate_up
from freetoken.kernels._triton import Card, Launch, jit, power_of_two, tl
from freetoken.kernels.grouped_mlp._sort import most_blocks
from freetoken.kernels.grouped_mlp._types import Form, Routes

_SCRATCH_BYTES = 256 << 20


@jit
def _weights(records, expert, offset, like):
    """A pointer to numbers of like's type, of which the compiler learns that it is aligned: records are."""
    address = tl.load(records + expert) + offset
    return tl.multiple_of(address.to(tl.pointer_type(like)), 16)


@jit(varying=("low", "high"))
def expert_middle(
    x, order, owner, first, records, middle, low, high, x_stride,
    K: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
    START: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.load(first + low)
    block = start + tl.program_id(0) // COLUMNS
    if block < tl.load(first + high):
        dtype = x.dtype.element_ty
        base = _weights(records, tl.load(owner + block), START, dtype)
        line = tl.arange(0, BM)
        route = tl.load(order + block * BM + line)
        used = route >= 0
        column = (tl.program_id(0) % COLUMNS) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + (tl.where(used, route, 0) // K).to(tl.int64)[:, None] * x_stride + k[None, :]
        place = (column // W) * (TILE // 2) + (column % W) * H
        g_at = base + place[None, :] + k[:, None]
        u_at = g_at + W * H
        real = (column < SIZE)[None, :]
        g = tl.zeros([BM, BN], tl.float32)
        u = tl.zeros([BM, BN], tl.float32)
        for h in range(0, H, BK):
            if H % BK == 0:
                rows = tl.load(x_at + h, mask=used[:, None], other=0.0)
                gw, uw = tl.load(g_at + h, mask=real, other=0.0), tl.load(u_at + h, mask=real, other=0.0)
            else:
                rows = tl.load(x_at + h, mask=used[:, None] & (h + k < H)[None, :], other=0.0)
                inside = real & (h + k < H)[:, None]
                gw, uw = tl.load(g_at + h, mask=inside, other=0.0), tl.load(u_at + h, mask=inside, other=0.0)
            g = tl.dot(rows, gw, g)
            u = tl.dot(rows, uw, u)
        if BIAS > 0:
            b_at = _weights(records, tl.load(owner + block), START + BIAS, tl.float32)
            b_at += (column // W) * (TILE // 4) + column % W
            g += tl.load(b_at, mask=column < SIZE, other=0.0)[None, :]
            u += tl.load(b_at + W, mask=column < SIZE, other=0.0)[None, :]
        y = gate_up(g, u, KIND, ALPHA, LIMIT, OFFSET).to(dtype)
        to = middle + ((block - start) * BM + line).to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(to, y, mask=real)


@jit(varying=("low", "high"))
def expert_down(
    middle, owner, first, records, z, low, high, from_column, z_stride,
    H: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, START: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.load(first + low)
    block = start + tl.program_id(0) // COLUMNS
    if block < tl.load(first + high):
        dtype = middle.dtype.element_ty
        expert = tl.load(owner + block)
        base = _weights(records, expert, START, dtype) + 2 * W * H
        line = ((block - start) * BM + tl.arange(0, BM)).to(tl.int64)
        here = (tl.program_id(0) % COLUMNS) * BN + tl.arange(0, BN)
        column = from_column + here
        k = tl.arange(0, BK)
        m_at = middle + line[:, None] * SIZE + k[None, :]
        real = (column < H)[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        for i in range(0, SIZE, BK):
            row = i + k
            d_at = base + ((row // W) * (TILE // 2) + (row % W) * H)[:, None] + column[None, :]
            if SIZE % BK == 0:
                m = tl.load(m_at + i)
                d = tl.load(d_at, mask=real, other=0.0)
            else:
                m = tl.load(m_at + i, mask=(row < SIZE)[None, :], other=0.0)
                d = tl.load(d_at, mask=real & (row < SIZE)[:, None], other=0.0)
            total = tl.dot(m, d, total)
        if BIAS > 0:
            b_at = _weights(records, expert, 0, tl.float32) + column
            total += tl.load(b_at, mask=column < H, other=0.0)[None, :]
        tl.store(z + line[:, None] * z_stride + here[None, :], total, mask=real)


@jit(varying=("low", "high"))
def add_routes(
    ids, weights, place, first, z, out, low, high, from_column, width, z_stride,
    K: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = here < width
    to = out + row * H + from_column + here
    total = tl.load(to, mask=inside, other=0.0)
    start = tl.load(first + low) * BM
    for j in range(K):
        expert = tl.load(ids + row * K + j)
        if (expert >= low) & (expert < high):
            line = (tl.load(place + row * K + j) - start).to(tl.int64)
            part = tl.load(z + line * z_stride + here, mask=inside, other=0.0)
            total += tl.load(weights + row * K + j) * part
    tl.store(to, total, mask=inside)


def block_rows(rows: int, top_k: int, num_experts: int) -> int:
    """Rows of a block: about what an expert has, so that little is padding."""
    each = rows * top_k // max(1, num_experts)
    return 128 if each >= 96 else 64 if each >= 48 else 32 if each >= 24 else 16


def blocks_of(bm: int, where: Card) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """(BN, BK, warps, stages) of the two products. Two stages of both weights and rows must fit."""
    if bm == 128 and where.arch == 90:
        return (128, 64, 8, 4), (256, 64, 8, 4)
    if bm == 128:
        large = where.shared_bytes > 128 << 10
        return (64, 64, 8, 4 if large else 3), (128, 64, 8, 4 if large else 3)
    warps = 4
    return (64, 64, warps, 4 if bm <= 32 else 3), (64, 64, warps, 4)


def plan(
    x: Tensor,
    routes: Routes,
    weights: Tensor,
    records: Tensor,
    form: Form,
    span: tuple[int, int],
    out: Tensor,
    where: Card,
) -> list[Launch]:
    rows, top_k = routes.ids.shape
    bm, size, hidden = routes.block, form.expert_size, form.hidden
    blocks = most_blocks(rows, top_k, span[1] - span[0], bm)
    one, two = blocks_of(bm, where)
    middle = torch.empty(blocks * bm, size, dtype=x.dtype, device=x.device)
    lay = {
        "W": form.tile_width,
        "TILE": form.tile_bytes,
        "START": form.tiles_offset,
        "BIAS": form.bias_offset,
    }
    consts = lay | {"K": top_k, "H": hidden, "SIZE": size} | gate_consts(form.activation)
    consts |= {"BM": bm, "BN": one[0], "BK": one[1], "COLUMNS": -(-size // one[0])}
    facts = (routes.first, records)
    args = (x, routes.order, routes.owner, *facts, middle, *span, x.stride(0))
    found = [Launch(expert_middle, (blocks * consts["COLUMNS"],), args, consts, one[2], one[3])]
    # Running sums of all routes would be large: some columns of H at a time.
    parts = -(-blocks * bm * hidden * 4 // _SCRATCH_BYTES)
    width = min(hidden, -(-hidden // parts // two[0]) * two[0])
    z = torch.empty(blocks * bm, width, dtype=torch.float32, device=x.device)
    for column in range(0, hidden, width):
        here = min(width, hidden - column)
        consts = lay | {"H": hidden, "SIZE": size, "BM": bm, "BN": two[0], "BK": two[1]}
        consts |= {"COLUMNS": -(-here // two[0])}
        args = (middle, routes.owner, *facts, z, *span, column, width)
        found.append(Launch(expert_down, (blocks * consts["COLUMNS"],), args, consts, two[2], two[3]))
        wide = min(1024, power_of_two(here))
        args = (routes.ids, weights, routes.place, routes.first, z, out, *span, column, here, width)
        consts = {"K": top_k, "H": hidden, "BM": bm, "BH": wide}
        found.append(Launch(add_routes, (rows, -(-here // wide)), args, consts))
    return found
