"""Linear for a few rows of 16-bit numbers on a CUDA device; many rows are cuBLAS's business."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels import _gemv
from freetoken.kernels._triton import Card, Launch, card
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.linear import reference

RANK = 20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _gemv.fits(x, weight, bias):
        return reference.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for launch in plan(x, weight, bias, None, out, card(x.device)):
        launch()
    return out


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if not _gemv.fits(x, weight, bias, residual):
        return residual + reference.linear(x, weight, bias)
    out = torch.empty_like(residual)
    for launch in plan(x, weight, bias, residual, out, card(x.device)):
        launch()
    return out


def plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, where: Card
) -> list[Launch]:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _gemv.launches(rows, weight, out, where, bias=bias, residual=residual)


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return reference.linear_exact(x, weight, bias)


def place(weight: Tensor) -> Tensor:
    return weight


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """What is compiled ahead of time: rows, N, K of models that people run."""

    def one(rows: int, n: int, k: int, extras: bool) -> Callable[[Card], list[Launch]]:
        x, weight, out = (torch.empty(s, dtype=dtype, device="meta") for s in ((rows, k), (n, k), (rows, n)))
        bias = out[0] if extras else None
        return lambda where: plan(x, weight, bias, out if extras else None, out, where)

    for rows in (1, 2, 8, 9, 16):
        for n, k in ((2048, 4096), (5120, 2048), (151936, 2048), (5120, 2880)):
            yield one(rows, n, k, n == 2048)
