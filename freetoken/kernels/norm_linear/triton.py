"""Norm and product in one launch for a single row; two for a few; cuBLAS beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels import _gemv
from freetoken.kernels._triton import Card, Launch, card
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.linear import reference as plain
from freetoken.kernels.rms_norm import triton as rms

RANK = 20


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _gemv.fits(x, weight, bias):
        return plain.linear(rms.rms_norm(x, norm, eps), weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for launch in plan((x, norm, eps), weight, bias, out, card(x.device)):
        launch()
    return out


def plan(
    normed: tuple[Tensor, Tensor, float], weight: Tensor, bias: Tensor | None, out: Tensor, where: Card
) -> list[Launch]:
    x, norm, eps = normed
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.shape[0] == 1:
        return _gemv.launches(rows, weight, out, where, norm=norm, eps=eps, bias=bias)
    middle = torch.empty_like(rows)
    return [
        *rms.plan(rows, norm, eps, middle, where),
        *_gemv.launches(middle, weight, out, where, bias=bias),
    ]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for rows, n, k in ((1, 5120, 2048), (1, 12352, 2048), (1, 5120, 2880), (4, 5120, 2048)):
        x, weight, out = (torch.empty(s, dtype=dtype, device="meta") for s in ((rows, k), (n, k), (rows, n)))
        norm = torch.empty(k, device="meta")
        yield lambda where, given=(x, norm, 1e-6), w=weight, out=out: plan(given, w, None, out, where)
