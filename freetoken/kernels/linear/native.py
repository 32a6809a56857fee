"""Linear for a few rows of 16-bit numbers by the native library: as fast as memory gives the weights.

Many rows, other types and small matrices go to torch, which is as good there. A row's bits don't depend
on the rows beside it as long as all of them come this way. A norm before and a residual after are part
of the same call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._native import on_huge_pages
from freetoken.kernels.linear import reference
from freetoken.native.library import Library, library
from freetoken.native.ops import Product

RANK = 10
MOST_ROWS = 16
LEAST_WEIGHTS = 1 << 16
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


def supports(device_type: str) -> bool:
    return device_type == "cpu" and library() is not None


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if the library computes this product."""
    return (
        0 < x.shape[:-1].numel() <= MOST_ROWS
        and weight.numel() >= LEAST_WEIGHTS
        and weight.dtype in _DTYPES
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    lib = library()
    if lib is None or not takes(x, weight, bias):
        return reference.linear(x, weight, bias)
    return call(lib, x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    lib = library()
    if lib is None or not takes(x, weight, bias) or residual.dtype != x.dtype:
        return residual + linear(x, weight, bias)
    return call(lib, x, weight, bias, residual=residual.contiguous())


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return reference.linear_exact(x, weight, bias)


def place(weight: Tensor) -> Tensor:
    return on_huge_pages(weight)


def call(
    lib: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + linear(rms_norm(x)); what is None is left out. Everything contiguous, as `takes` says."""
    n, k = weight.shape
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
    scale, eps = (norm[0].data_ptr(), norm[1]) if norm else (0, 0.0)
    given, added = (0 if t is None else t.data_ptr() for t in (bias, residual))
    places = (x.data_ptr(), scale, weight.data_ptr(), given, added, y.data_ptr())
    lib.run(Product(*places, x.shape[:-1].numel(), n, k, eps, _DTYPES[x.dtype]))
    return y
