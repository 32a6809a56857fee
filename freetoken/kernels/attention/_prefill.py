"""Causal attention of many new tokens of one sequence over its pages, without gathering them.

A block holds BM query rows of one head and walks the keys with a running peak and sum; blocks that have most
keys come first. Keys that all rows of a block see need no mask. Page ids are read once per page where a page
holds at least a block of keys, else once per key.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._triton import Card, Launch, jit, power_of_two, tl
from freetoken.kernels.attention._decode import LOG2_E, _precision


@jit
def walk_keys(
    carried,
    rows,
    pages,
    table,
    bounds,
    strides,
    scale,
    places,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    peak, total, mixed = carried
    start, stop, length = bounds
    page_stride, half_stride, token_stride = strides
    key, dim = tl.arange(0, BN), tl.arange(0, DP)
    for first in range(start, stop, BN):
        at = first + key
        if PAGE >= BN:
            page = tl.load(table + first // PAGE)
            place = page * page_stride + (first % PAGE + key) * token_stride
        else:
            page = tl.load(table + at // PAGE, mask=at < length, other=0)
            place = page * page_stride + (at % PAGE) * token_stride
        k_at = pages + place[None, :] + dim[:, None]
        v_at = pages + half_stride + place[:, None] + dim[None, :]
        if MASKED:
            k = tl.load(k_at, mask=(at < length)[None, :] & (dim < D)[:, None], other=0.0)
        elif DP != D:
            k = tl.load(k_at, mask=(dim < D)[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        score = tl.dot(rows, k, input_precision=PRECISION)
        if MASKED:
            seen = at[None, :] <= places[:, None]
            if WINDOW is not None:
                seen &= at[None, :] > places[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        # A row that has seen nothing yet keeps its peak at -inf; its differences must not be nan.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weight = tl.exp2(score * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        if MASKED:
            v = tl.load(v_at, mask=(at < length)[:, None] & (dim < D)[None, :], other=0.0)
        elif DP != D:
            v = tl.load(v_at, mask=(dim < D)[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weight.to(v.dtype), v, mixed, input_precision=PRECISION)
        peak = higher
    return peak, total, mixed


@jit(varying=("n", "length"))
def flash_attention(
    q,
    pages,
    table,
    sinks,
    out,
    n,
    length,
    scale,
    q_stride,
    head_stride,
    page_stride,
    half_stride,
    token_stride,
    kv_stride,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    row, dim = first + tl.arange(0, BM), tl.arange(0, DP)
    here = (row < n)[:, None] & (dim < D)[None, :]
    past = length - n
    places = past + row
    at = q + row.to(tl.int64)[:, None] * q_stride + head * head_stride + dim[None, :]
    rows = tl.load(at, mask=here, other=0.0)
    kv = pages + (head // G) * kv_stride
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if sinks is not None:
        peak = tl.zeros([BM], tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
    mixed = tl.zeros([BM, DP], tl.float32)
    stop = tl.minimum(past + first + BM, length)
    # Keys below `clear` are seen by every row of this block; a window masks the oldest too.
    clear = (past + first + 1) // BN * BN
    start = 0
    if WINDOW is not None:
        start = tl.maximum(past + first - WINDOW + 1, 0) // BN * BN
        clear = start
    carried = (peak, total, mixed)
    strides = (page_stride, half_stride, token_stride)
    if WINDOW is None:
        carried = walk_keys(
            carried, rows, kv, table, (start, clear, length), strides, scale, places,
            D, DP, PAGE, BN, WINDOW, False, PRECISION,
        )  # fmt: skip
    carried = walk_keys(
        carried, rows, kv, table, (clear, stop, length), strides, scale, places,
        D, DP, PAGE, BN, WINDOW, True, PRECISION,
    )  # fmt: skip
    peak, total, mixed = carried
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    to = out + (row.to(tl.int64)[:, None] * N + head) * D + dim[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=here)


def plan(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    out: Tensor,
    where: Card,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """One launch that fills contiguous out [n, N, D]."""
    (n, heads, dim), (_, _, page_size, kv_heads, _) = q.shape, pages.shape
    wide = power_of_two(dim)
    bm, bn, warps, stages = block(n, wide * q.element_size(), where)
    args = (q, pages, table, sinks, out, n, length, scale * LOG2_E)
    args += (q.stride(0), q.stride(1), *pages.stride()[:4])
    consts = {"N": heads, "G": heads // kv_heads, "D": dim, "DP": wide, "PAGE": page_size, "BM": bm, "BN": bn}
    consts |= {"WINDOW": window or None, "PRECISION": _precision(q)}
    return [Launch(flash_attention, (heads, -(-n // bm)), args, consts, warps, stages)]


def block(n: int, row_bytes: int, where: Card) -> tuple[int, int, int, int]:
    """Query rows, keys, warps and stages: what fits shared memory and registers."""
    large = where.shared_bytes > 128 << 10
    if n <= 64:
        return (16 if n <= 16 else 64), min(64, max(16, (16384 if n <= 16 else 8192) // row_bytes)), 4, 2
    if row_bytes <= 128:
        return 128, (128 if where.arch == 90 else 64), 8, (2 if where.arch == 90 else 3)
    if row_bytes <= 256:
        return (128, 128, 8, 2) if where.arch == 90 else (128, 64, 8, 3 if where.arch == 80 else 2)
    if row_bytes <= 512:
        return (128, 64, 8, 2) if where.arch == 90 else (64, 32, 8, 3 if large else 2)
    return (64, 32, 8, 2) if large else (32, 16, 4, 2)
