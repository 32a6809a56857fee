"""Norm, rotation and page writes of a row's heads in one launch: each value is read and written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.rope_store import reference

RANK = 20


@jit(varying=("table_stride",))
def rope_heads(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    seq_of,
    live,
    table,
    out,
    pages,
    eps,
    row_stride,
    table_stride,
    page_stride,
    half_stride,
    token_stride,
    kv_stride,
    N: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    REST: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    is_query, is_value = head < N, head >= N + NKV
    used = head < N + 2 * NKV
    source = qkv + row * row_stride + tl.where(is_query, head * STEP, N * STEP + (head - N) * D)
    position = tl.load(positions + row)
    living = tl.load(live + row)
    column = tl.where(living, position // PAGE, 0)
    page = tl.load(table + tl.load(seq_of + row) * table_stride + column)
    page = tl.where(living, page, 0)
    spot = pages + page * page_stride + (position % PAGE) * token_stride
    other = tl.where(is_value, head - N - NKV, head - N)
    stored = tl.where(is_query, 0, other * kv_stride + tl.where(is_value, half_stride, 0))

    turn, rest = tl.arange(0, RP), 2 * R + tl.arange(0, REST)
    inside, beyond = used[:, None] & (turn < R)[None, :], used[:, None] & (rest < D)[None, :]
    first = tl.load(source[:, None] + turn[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + R + turn[None, :], mask=inside, other=0.0).to(tl.float32)
    third = tl.zeros([BH, REST], tl.float32)
    if 2 * R < D:
        third = tl.load(source[:, None] + rest[None, :], mask=beyond, other=0.0).to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if 2 * R < D:
            squares += tl.sum(third * third, 1)
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / D + eps))[:, None]
        first = first * scale * _factor(q_norm, k_norm, is_query, is_value, turn, turn < R)
        second = second * scale * _factor(q_norm, k_norm, is_query, is_value, R + turn, turn < R)
        first = first.to(out.dtype.element_ty).to(tl.float32)
        second = second.to(out.dtype.element_ty).to(tl.float32)
        if 2 * R < D:
            third = third * scale * _factor(q_norm, k_norm, is_query, is_value, rest, rest < D)
    c = tl.load(cos + position * R + turn, mask=turn < R, other=0.0)[None, :]
    s = tl.load(sin + position * R + turn, mask=turn < R, other=0.0)[None, :]
    turned = tl.where(is_value[:, None], first, first * c - second * s)
    second = tl.where(is_value[:, None], second, second * c + first * s)
    at = out + (row * N + head) * D
    _store(at, spot + stored, turn, turned, inside, is_query, out, pages)
    _store(at, spot + stored, R + turn, second, inside, is_query, out, pages)
    if 2 * R < D:
        _store(at, spot + stored, rest, third, beyond, is_query, out, pages)


@jit
def _factor(q_norm, k_norm, is_query, is_value, dim, inside):
    """The norm's weights of each head at `dim`: of queries, of keys, ones for values."""
    q = tl.load(q_norm + dim, mask=inside, other=0.0)[None, :]
    k = tl.load(k_norm + dim, mask=inside, other=0.0)[None, :]
    return tl.where(is_value[:, None], 1.0, tl.where(is_query[:, None], q, k))


@jit
def _store(at, spot, dim, value, inside, is_query, out, pages):
    query = inside & is_query[:, None]
    tl.store(at[:, None] + dim[None, :], value.to(out.dtype.element_ty), mask=query)
    cached = inside & (is_query == 0)[:, None]
    tl.store(spot[:, None] + dim[None, :], value.to(pages.dtype.element_ty), mask=cached)


def rope_store(
    qkv: Tensor,
    heads: Any,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    pages: Tensor,
    place: Any,
) -> Tensor:
    if qkv.stride(-1) != 1 or pages.stride(-1) != 1 or not qkv.shape[0]:
        return reference.rope_store(qkv, heads, norms, angles, pages, place)
    out = torch.empty(qkv.shape[0], heads.num, heads.dim, dtype=qkv.dtype, device=qkv.device)
    for launch in plan(qkv, heads, norms, angles, (out, pages), place, card(qkv.device)):
        launch()
    return out


def plan(
    qkv: Tensor,
    heads: Any,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    to: tuple[Tensor, Tensor],
    place: Any,
    where: Card,
) -> list[Launch]:
    (out, pages), turning = to, angles[0].shape[1]
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    count = heads.num + 2 * heads.num_kv
    # One row fills few SMs: a head a block. Many rows: as many heads as make 1024 numbers.
    block = 1 if qkv.shape[0] <= 8 else max(1, min(power_of_two(count), 1024 // power_of_two(heads.dim)))
    args = (qkv, q_norm, k_norm, *angles, place.positions, place.seq_of, place.live, place.page_table)
    args += (out, pages, eps, qkv.stride(0), place.page_table.stride(0), *pages.stride()[:4])
    consts = {"N": heads.num, "NKV": heads.num_kv, "D": heads.dim, "STEP": heads.dim * (1 + heads.gated)}
    consts |= {
        "R": turning,
        "RP": power_of_two(turning),
        "PAGE": pages.shape[2],
        "BH": block,
        "PDL": where.pdl,
    }
    consts["REST"] = power_of_two(max(1, heads.dim - 2 * turning))
    warps = 1 if block == 1 else 4
    return [Launch(rope_heads, (qkv.shape[0], -(-count // block)), args, consts, warps)]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    def one(rows: int, heads: SimpleNamespace, turning: int, normed: bool) -> Callable[[Card], list[Launch]]:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        width = heads.num * heads.dim * (1 + heads.gated) + 2 * heads.num_kv * heads.dim
        norm = empty(heads.dim, dtype=torch.float32)
        angle = empty(4096, turning, dtype=torch.float32)
        ints = empty(rows, dtype=torch.int64)
        live, table = empty(rows, dtype=torch.bool), empty(rows, 64, dtype=torch.int64)
        place = SimpleNamespace(positions=ints, seq_of=ints, live=live, page_table=table)
        out, pages = empty(rows, heads.num, heads.dim), empty(9, 24, 2, 16, heads.num_kv, heads.dim)[:, 2]
        norms = (norm, norm, 1e-6) if normed else None
        return lambda where: plan(
            empty(rows, width), heads, norms, (angle, angle), (out, pages), place, where
        )

    for rows in (1, 512):
        yield one(rows, SimpleNamespace(num=32, num_kv=4, dim=128, gated=False), 64, True)
        yield one(rows, SimpleNamespace(num=16, num_kv=2, dim=256, gated=True), 32, True)
        yield one(rows, SimpleNamespace(num=64, num_kv=8, dim=64, gated=False), 32, False)
