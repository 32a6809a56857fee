"""Paged attention of one new token per sequence, or a few of one, split over the context.

The grid is fixed by the width of the page table; the device's own context lengths say which part of it has
work, so a captured launch stays right while contexts grow. A block holds a key head's whole group of query
rows and some run of keys; a second launch adds the runs in ascending order, with the sink if there is one.
Invariant: bytes beyond a context, and pages of other sequences, are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, floor_power_of_two, jit, power_of_two, tl

LOG2_E = 1.4426950408889634
_MOST_SPLITS = 64


@jit(varying=("table_stride", "tokens", "known"))
def split_attention(
    q,
    pages,
    table,
    context,
    out,
    peaks,
    sums,
    sinks,
    tokens,
    known,
    scale,
    q_stride,
    head_stride,
    table_stride,
    page_stride,
    half_stride,
    token_stride,
    kv_stride,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    b, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * G
    length = known
    if context is not None:
        length = tl.load(context + b)  # of the step, which is older than any kernel under way
    pdl.await_previous(PDL)
    low = 0
    if WINDOW is not None:
        low = tl.maximum(length - tokens + 1 - WINDOW, 0)
    first = low // BN
    blocks = tl.cdiv(length, BN) - first
    each = tl.cdiv(blocks, SPLITS)
    start = tl.minimum(split * each, blocks)
    stop = tl.minimum(start + each, blocks)

    row, dim, key = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    token, head = row // G, kv * G + row % G
    real = token < tokens
    here = real[:, None] & (dim < D)[None, :]
    where = b.to(tl.int64) * tokens + token
    rows = tl.load(
        q + where[:, None] * q_stride + head[:, None] * head_stride + dim[None, :], mask=here, other=0.0
    )
    where = where * heads + head
    limit = length - tokens + token
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    mixed = tl.zeros([GP, DP], tl.float32)
    for block in range(start, stop):
        at = (first + block) * BN + key
        stored = (at >= low) & (at < length)
        page = tl.load(table + b.to(tl.int64) * table_stride + at // PAGE, mask=at < length, other=0)
        place = page * page_stride + (at % PAGE) * token_stride + kv * kv_stride
        k = tl.load(
            pages + place[None, :] + dim[:, None], mask=stored[None, :] & (dim < D)[:, None], other=0.0
        )
        score = tl.dot(rows, k, input_precision=PRECISION) * scale
        seen = at[None, :] <= limit[:, None]
        if WINDOW is not None:
            seen &= at[None, :] > limit[:, None] - WINDOW
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # A row that has seen nothing yet keeps its peak at -inf; its differences must not be nan.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        v = tl.load(
            pages + half_stride + place[:, None] + dim[None, :],
            mask=stored[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        peak = higher
    if SPLITS == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
            higher = tl.maximum(peak, sink)
            mixed *= tl.exp2(peak - higher)[:, None]
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + where[:, None] * D + dim[None, :], mixed.to(out.dtype.element_ty), mask=here)
    else:
        spot = where * SPLITS + split
        tl.store(peaks + spot, peak, mask=real)
        tl.store(sums + spot, total, mask=real)
        if start < stop:
            tl.store(out + spot[:, None] * D + dim[None, :], mixed, mask=here)


@jit
def merge_splits(
    parts,
    peaks,
    sums,
    sinks,
    out,
    N,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    where = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DP)
    peak = tl.load(peaks + where * SPLITS + split)
    total = tl.load(sums + where * SPLITS + split)
    # Asked for before it is known which runs had keys: bytes that nobody wrote are left out below.
    at = parts + (where * SPLITS + split)[:, None] * D + dim[None, :]
    part = tl.load(at, mask=(dim < D)[None, :], other=0.0)
    higher = tl.max(peak, 0)
    if sinks is not None:
        sink = tl.load(sinks + where % N) * 1.4426950408889634
        higher = tl.maximum(higher, sink)
    higher = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(peak - higher)
    mixed = tl.sum(tl.where((total > 0)[:, None], part, 0.0) * share[:, None], 0)
    whole = tl.sum(total * share, 0)
    if sinks is not None:
        whole += tl.exp2(sink - higher)
    mixed = mixed / tl.where(whole > 0, whole, 1.0)
    tl.store(out + where * D + dim, mixed.to(out.dtype.element_ty), mask=dim < D)


def most_tokens(heads: int, kv_heads: int, dim: int) -> int:
    """New tokens of one sequence whose query rows fit a block."""
    return min(128, (1 << 14) // power_of_two(dim)) // (heads // kv_heads)


def plan(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    context: Tensor | int,
    out: Tensor,
    where: Card,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """Launches that fill contiguous out [B, N, D]; see the contract for the rest.

    context an int: q are the last B tokens of one sequence of that length, B <= most_tokens; table [1, W].
    """
    (count, heads, dim), (_, _, page_size, kv_heads, _) = q.shape, pages.shape
    one = isinstance(context, int)
    batch, tokens = (1, count) if one else (count, 1)
    group, wide = heads // kv_heads, power_of_two(dim)
    rows = max(16, power_of_two(group * tokens))
    bn = max(16, min(64, 8192 * 2 // (wide * q.element_size())))
    reach = context if one else table.shape[1] * page_size
    if window:
        reach = min(reach, window + tokens + bn)
    wanted = -(-2 * where.sms // (batch * kv_heads))
    splits = floor_power_of_two(max(1, min(_MOST_SPLITS, wanted, -(-reach // bn))))
    parts, peaks, sums = out, None, None
    if splits > 1:
        parts = torch.empty(count, heads, splits, dim, dtype=torch.float32, device=q.device)
        peaks, sums = (
            torch.empty(count, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2)
        )
    args = (q, pages, table, None if one else context, parts, peaks, sums, sinks if splits == 1 else None)
    args += (tokens, context if one else 0, scale * LOG2_E)
    args += (q.stride(0), q.stride(1), table.stride(0), *pages.stride()[:4])
    consts = {"G": group, "GP": rows, "D": dim, "DP": wide, "PAGE": page_size, "BN": bn}
    consts |= {"SPLITS": splits, "WINDOW": window or None, "PRECISION": _precision(q), "PDL": where.pdl}
    warps = 4 if rows * wide <= 8192 else 8
    found = [Launch(split_attention, (batch, kv_heads, splits), args, consts, warps, stages=3)]
    if splits > 1:
        consts = {"D": dim, "DP": wide, "SPLITS": splits, "PDL": where.pdl}
        args = (parts, peaks, sums, sinks, out, heads)
        found.append(Launch(merge_splits, (count * heads,), args, consts))
    return found


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"
