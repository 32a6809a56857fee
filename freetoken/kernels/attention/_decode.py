"""Paged attention of one new token per sequence, split over the context.

The grid is fixed by the width of the page table; the device's own context lengths say which part of it has
work, so a captured launch stays right while contexts grow. A block holds a key head's whole group of query
rows and some run of keys; a second launch adds the runs in ascending order, with the sink if there is one.
Invariant: bytes beyond a context, and pages of other sequences, are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, floor_power_of_two, jit, power_of_two, tl

LOG2_E = 1.4426950408889634
_MOST_SPLITS = 64


@jit(varying=("table_stride",))
def split_attention(
    q,
    pages,
    table,
    context,
    out,
    peaks,
    sums,
    sinks,
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
):
    b, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * G
    length = tl.load(context + b)
    low = 0
    if WINDOW is not None:
        low = tl.maximum(length - WINDOW, 0)
    first = low // BN
    blocks = tl.cdiv(length, BN) - first
    each = tl.cdiv(blocks, SPLITS)
    start = tl.minimum(split * each, blocks)
    stop = tl.minimum(start + each, blocks)

    group, dim, key = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    head = kv * G + group
    here = (group < G)[:, None] & (dim < D)[None, :]
    rows = tl.load(
        q + b.to(tl.int64) * q_stride + head[:, None] * head_stride + dim[None, :], mask=here, other=0.0
    )
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    mixed = tl.zeros([GP, DP], tl.float32)
    for block in range(start, stop):
        at = (first + block) * BN + key
        seen = (at >= low) & (at < length)
        page = tl.load(table + b.to(tl.int64) * table_stride + at // PAGE, mask=at < length, other=0)
        place = page * page_stride + (at % PAGE) * token_stride + kv * kv_stride
        k = tl.load(pages + place[None, :] + dim[:, None], mask=seen[None, :] & (dim < D)[:, None], other=0.0)
        score = tl.dot(rows, k, input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        v = tl.load(
            pages + half_stride + place[:, None] + dim[None, :],
            mask=seen[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        peak = higher
    where = (b * heads + head).to(tl.int64)
    if SPLITS == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=group < G, other=0.0) * 1.4426950408889634
            higher = tl.maximum(peak, sink)
            mixed *= tl.exp2(peak - higher)[:, None]
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + where[:, None] * D + dim[None, :], mixed.to(out.dtype.element_ty), mask=here)
    else:
        spot = where * SPLITS + split
        tl.store(peaks + spot, peak, mask=group < G)
        tl.store(sums + spot, total, mask=group < G)
        if start < stop:
            tl.store(out + spot[:, None] * D + dim[None, :], mixed, mask=here)


@jit
def merge_splits(parts, peaks, sums, sinks, out, N, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    where = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DP)
    peak = tl.load(peaks + where * SPLITS + split)
    total = tl.load(sums + where * SPLITS + split)
    higher = tl.max(peak, 0)
    if sinks is not None:
        sink = tl.load(sinks + where % N) * 1.4426950408889634
        higher = tl.maximum(higher, sink)
    higher = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(peak - higher)
    mask = (total > 0)[:, None] & (dim < D)[None, :]
    part = tl.load(parts + (where * SPLITS + split)[:, None] * D + dim[None, :], mask=mask, other=0.0)
    mixed = tl.sum(part * share[:, None], 0)
    whole = tl.sum(total * share, 0)
    if sinks is not None:
        whole += tl.exp2(sink - higher)
    mixed = mixed / tl.where(whole > 0, whole, 1.0)
    tl.store(out + where * D + dim, mixed.to(out.dtype.element_ty), mask=dim < D)


def plan(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    context: Tensor,
    out: Tensor,
    where: Card,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """Launches that fill contiguous out [B, N, D]; see the contract for the rest."""
    (batch, heads, dim), (_, _, page_size, kv_heads, _) = q.shape, pages.shape
    group, wide = heads // kv_heads, power_of_two(dim)
    bn = max(16, min(64, 8192 * 2 // (wide * q.element_size())))
    reach = table.shape[1] * page_size
    if window:
        reach = min(reach, window + bn)
    wanted = -(-2 * where.sms // (batch * kv_heads))
    splits = floor_power_of_two(max(1, min(_MOST_SPLITS, wanted, -(-reach // bn))))
    parts, sums = out, None
    if splits > 1:
        parts = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=q.device)
    peaks, sums = (None, None) if sums is None else (sums[0], sums[1])
    args = (q, pages, table, context, parts, peaks, sums, sinks if splits == 1 else None, scale * LOG2_E)
    args += (q.stride(0), q.stride(1), table.stride(0), *pages.stride()[:4])
    consts = {
        "G": group,
        "GP": max(16, power_of_two(group)),
        "D": dim,
        "DP": wide,
        "PAGE": page_size,
        "BN": bn,
    }
    consts |= {"SPLITS": splits, "WINDOW": window or None, "PRECISION": _precision(q)}
    found = [Launch(split_attention, (batch, kv_heads, splits), args, consts, stages=3)]
    if splits > 1:
        consts = {"D": dim, "DP": wide, "SPLITS": splits}
        found.append(Launch(merge_splits, (batch * heads,), (parts, peaks, sums, sinks, out, heads), consts))
    return found


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"
