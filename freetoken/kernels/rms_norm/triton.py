"""RMS norm on a CUDA device: a few rows a block, one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.rms_norm import reference

RANK = 20
WIDEST = 16384


@jit(varying=("R", "inner"))
def norm_rows(
    x,
    weight,
    out,
    R,
    inner,
    outer_stride,
    inner_stride,
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    col = tl.arange(0, DP)
    inside = (row < R)[:, None] & (col < D)[None, :]
    at = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    v = tl.load(x + at[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    v = v * scale[:, None] * tl.load(weight + col, mask=col < D, other=0.0)[None, :]
    to = out + row.to(tl.int64)[:, None] * D + col[None, :]
    tl.store(to, v.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not 0 < x.shape[-1] <= WIDEST or not x.numel():
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for launch in plan(x, weight, eps, out, card(x.device)):
        launch()
    return out


def plan(x: Tensor, weight: Tensor, eps: float, out: Tensor, where: Card) -> list[Launch]:
    """x [.., D] with up to two leading axes of any stride, or contiguous; out contiguous."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    width = x.shape[-1]
    view = x if x.dim() == 3 else x.reshape(-1, 1, width)
    rows, inner = view.shape[0] * view.shape[1], view.shape[1]
    wide = power_of_two(width)
    block = max(1, 1024 // wide)
    warps = 4 if wide <= 2048 else 8
    consts = {"D": width, "DP": wide, "BR": block, "PDL": where.pdl}
    args = (view, weight.contiguous(), out, rows, inner, view.stride(0), view.stride(1), eps)
    return [Launch(norm_rows, (-(-rows // block),), args, consts, warps=warps)]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for shape in ((4, 2048), (512, 32, 128), (7, 2880), (3, 4, 80)):
        x = torch.empty(shape, dtype=dtype, device="meta")
        weight = torch.empty(shape[-1], device="meta")
        yield lambda where, x=x, weight=weight: plan(x, weight, 1e-6, x, where)
