"""Triton products of a few rows with a large matrix: as fast as memory gives the matrix.

    gemv      one row; each block owns BN rows of the matrix and its first tile is on its way before anything
              else is asked for, so a norm of x costs no time of its own
    narrow    2 to MOST_ROWS rows on the tensor cores, pipelined

Both add a bias before the rounding and a residual after it, as the separate operations would. Sums run in
one order that depends on shapes alone. Knows no layer.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import HALF, Card, Launch, jit, power_of_two, tl

MOST_ROWS = 16
LEAST_WEIGHTS = 1 << 16


@jit
def gemv(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    col = tl.arange(0, BK)
    at = weight + row.to(tl.int64)[:, None] * K + col[None, :]
    coming = tl.load(
        at, mask=(row < N)[:, None] & (col < K)[None, :], other=0.0, eviction_policy="evict_first"
    )
    pdl.await_previous(PDL)
    scale = 1.0
    if norm is not None:
        squares = tl.zeros([BK], tl.float32)
        for k in tl.static_range(0, K, BK):
            part = tl.load(x + k + col, mask=k + col < K, other=0.0).to(tl.float32)
            squares += part * part
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
    total = tl.zeros([BN, BK], tl.float32)
    for k in tl.static_range(0, K, BK):
        tile = coming
        if k + BK < K:
            inside = (row < N)[:, None] & (k + BK + col < K)[None, :]
            coming = tl.load(at + k + BK, mask=inside, other=0.0, eviction_policy="evict_first")
        part = tl.load(x + k + col, mask=k + col < K, other=0.0)
        if norm is not None:
            factor = tl.load(norm + k + col, mask=k + col < K, other=0.0)
            part = (part.to(tl.float32) * scale * factor).to(x.dtype.element_ty)
        total += tile.to(tl.float32) * part.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if bias is not None:
        y += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    if residual is not None:
        y = y.to(x.dtype.element_ty).to(tl.float32)
        y += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)


@jit(varying=("T",))
def narrow(
    x,
    weight,
    bias,
    residual,
    out,
    T,
    N,
    K: tl.constexpr,
    TP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.arange(0, TP)
    col = tl.arange(0, BK)
    w_at = weight + row.to(tl.int64)[:, None] * K + col[None, :]
    x_at = x + token[None, :] * K + col[:, None]
    total = tl.zeros([BN, TP], tl.float32)
    for k in range(0, K, BK):
        inside = k + col < K
        tile = tl.load(
            w_at + k, mask=(row < N)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        part = tl.load(x_at + k, mask=(token < T)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(tile, part, total)
    inside = (row < N)[:, None] & (token < T)[None, :]
    spot = token.to(tl.int64)[None, :] * N + row[:, None]
    if bias is not None:
        total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        total = total.to(x.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + spot, total.to(out.dtype.element_ty), mask=inside)


def fits(x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    """Whether x [.., K] by weight [N, K] is a product of this file's kind."""
    return (
        0 < x.shape[:-1].numel() <= MOST_ROWS
        and weight.numel() >= LEAST_WEIGHTS
        and x.dtype in HALF
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and all(o is None or (o.dtype == x.dtype and o.is_contiguous()) for o in others)
    )


def launches(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    where: Card,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> list[Launch]:
    """One launch for contiguous x [T, K], T <= MOST_ROWS (T = 1 if there is a norm); out [T, N]."""
    (rows, k), n = x.shape, weight.shape[0]
    if rows == 1:
        bn, bk, warps = _gemv_block(n, k, where)
        consts = {"K": k, "BN": bn, "BK": bk, "PDL": where.pdl}
        args = (x, norm, weight, bias, residual, out, eps, n)
        return [Launch(gemv, (-(-n // bn),), args, consts, warps=warps, stages=1)]
    assert norm is None
    bn, bk = 16, min(256, power_of_two(k))
    consts = {"K": k, "TP": 8 if rows <= 8 else 16, "BN": bn, "BK": bk, "PDL": where.pdl}
    args = (x, weight, bias, residual, out, rows, n)
    return [Launch(narrow, (-(-n // bn),), args, consts, warps=1, stages=4)]


def _gemv_block(n: int, k: int, where: Card) -> tuple[int, int, int]:
    """Rows, columns, warps of a block: 32 numbers a thread; half a block where that leaves SMs without work.

    Measured on an H200: 5120 x 2048 7.3 us (1,024 columns and 4 warps: 8.6), 2048 x 4096 5.7 (5.9), a head of
    151,936 rows 139 (152).
    """
    # A whole row in flight while the kernel before still runs.
    bk = min(4096 if where.pdl else 2048, power_of_two(k))
    bn, warps = 8192 // bk, 8
    while bn > 1 and n // bn < 4 * where.sms:
        bn, warps = bn // 2, max(2, warps // 2)
    return bn, bk, warps
