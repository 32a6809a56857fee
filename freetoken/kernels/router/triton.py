"""The router on a CUDA device: norm and logits over many blocks, then one warp a row that chooses.

A prompt's logits are a product of cuBLAS. The choice takes the largest probability top_k times, the lowest
expert first among equals, and writes what it took in ascending order by counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.linear import reference as plain
from freetoken.kernels.rms_norm import triton as rms
from freetoken.kernels.router import reference

RANK = 20
MOST_ROWS = 16


@jit
def norm_logits(
    h,
    norm,
    weight,
    bias,
    x,
    logits,
    eps,
    row_stride,
    E,
    H: tl.constexpr,
    HP: tl.constexpr,
    BE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    row = tl.program_id(1).to(tl.int64)
    expert, col = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, HP)
    inside = col < H
    at = weight + expert[:, None] * H + col[None, :]
    tile = tl.load(at, mask=(expert < E)[:, None] & inside[None, :], other=0.0)
    factor = tl.load(norm + col, mask=inside, other=0.0)
    pdl.await_previous(PDL)
    v = tl.load(h + row * row_stride + col, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v) / H + eps)
    v = (v * scale * factor).to(x.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(x + row * H + col, v, mask=inside)
    product = tl.sum(tile * v.to(tl.float32)[None, :], 1)
    if bias is not None:
        product += tl.load(bias + expert, mask=expert < E, other=0.0)
    tl.store(logits + row * E + expert, product, mask=expert < E)


@jit
def choose_top(
    logits,
    live,
    ids,
    weights,
    E,
    K: tl.constexpr,
    EP: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    score = tl.load(logits + row * E + expert, mask=expert < E, other=float("-inf"))
    power = tl.exp(score - tl.max(score, 0))
    share = power / tl.sum(power, 0)
    share = tl.where(share == share, share, 0.0)  # a row of nan must still name experts that exist
    # Shares are not negative, so their bits have their order; a warp finds the largest of integers at once.
    left = tl.where(expert < E, share.to(tl.int32, bitcast=True), -1)
    taken = tl.zeros([EP], tl.int32)
    for _ in tl.static_range(K):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, expert, EP), 0)
        taken = tl.where(expert == first, 1, taken)
        left = tl.where(expert == first, -2, left)
    if NORMALISE:
        share = share / tl.sum(tl.where(taken == 1, share, 0.0), 0)
    living = tl.load(live + row)
    rank = tl.cumsum(taken, 0) - 1
    tl.store(ids + row * K + rank, tl.where(living, expert, -1), mask=taken == 1)
    tl.store(weights + row * K + rank, tl.where(living, share, 0.0), mask=taken == 1)


def route(
    h: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    top_k: int,
    normalise: bool,
    live: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = h.shape[0]
    x = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    where = card(h.device)
    if not rows:
        return reference.route(h, norm, eps, weight, top_k, normalise, live, bias)
    if rows <= MOST_ROWS:
        logits = torch.empty(rows, weight.shape[0], dtype=torch.float32, device=h.device)
        launches = plan_logits(h, norm, eps, (weight, bias), (x, logits), where)
    else:
        launches = rms.plan(h, norm, eps, x, where)
    for launch in launches:
        launch()
    if rows > MOST_ROWS:
        logits = plain.linear(x.float(), weight, bias)
    return x, *choose_experts(logits, top_k, normalise, live)


def choose_experts(logits: Tensor, top_k: int, normalise: bool, live: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows:
        for launch in plan_choice(logits.contiguous(), live, (ids, weights), normalise, card(logits.device)):
            launch()
    return ids, weights


def plan_logits(
    h: Tensor,
    norm: Tensor,
    eps: float,
    router: tuple[Tensor, Tensor | None],
    to: tuple[Tensor, Tensor],
    where: Card,
) -> list[Launch]:
    weight, bias = router
    h = h if h.stride(-1) == 1 else h.contiguous()
    (rows, hidden), experts = h.shape, weight.shape[0]
    wide = power_of_two(hidden)
    block = max(1, min(power_of_two(experts), 4096 // wide))
    consts = {"H": hidden, "HP": wide, "BE": block, "PDL": where.pdl}
    args = (h, norm, weight, bias, *to, eps, h.stride(0), experts)
    return [Launch(norm_logits, (-(-experts // block), rows), args, consts, warps=4 if wide <= 4096 else 8)]


def plan_choice(
    logits: Tensor, live: Tensor, to: tuple[Tensor, Tensor], normalise: bool, where: Card
) -> list[Launch]:
    rows, experts = logits.shape
    wide = power_of_two(experts)
    consts = {"K": to[0].shape[1], "EP": wide, "NORMALISE": normalise, "PDL": where.pdl}
    args = (logits, live, *to, experts)
    return [Launch(choose_top, (rows,), args, consts, warps=1 if wide <= 512 else 4)]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    def one(rows: int, experts: int, hidden: int, top_k: int) -> Callable[[Card], list[Launch]]:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        h, norm, weight = empty(rows, hidden, dtype=dtype), empty(hidden), empty(experts, hidden)
        logits, live = empty(rows, experts), empty(rows, dtype=torch.bool)
        bias = empty(experts) if experts == 32 else None
        to = (empty(rows, top_k, dtype=torch.int32), empty(rows, top_k))
        return lambda where: [
            *plan_logits(h, norm, 1e-6, (weight, bias), (h, logits), where),
            *plan_choice(logits, live, to, True, where),
        ]

    for experts, hidden, top_k in ((128, 2048, 8), (256, 2048, 8), (512, 4096, 10), (32, 2880, 4)):
        yield one(1 if experts < 300 else 4, experts, hidden, top_k)
