"""Linear for a few rows of 16-bit numbers by the native library: as fast as memory gives the weights.

Many rows, other types and small matrices go to torch, which is as good there. A row's bits don't depend
on the rows beside it as long as all of them come this way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.linear import reference
from freetoken.native.library import Library, library

RANK = 10
MOST_ROWS = 16
LEAST_WEIGHTS = 1 << 16
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


def supports(device_type: str) -> bool:
    return device_type == "cpu" and library() is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    lib = library()
    rows = x.shape[:-1].numel()
    if (
        lib is None
        or not 0 < rows <= MOST_ROWS
        or weight.numel() < LEAST_WEIGHTS
        or weight.dtype not in _DTYPES
        or x.dtype != weight.dtype
        or not weight.is_contiguous()
        or (bias is not None and not (bias.dtype == x.dtype and bias.is_contiguous()))
    ):
        return reference.linear(x, weight, bias)
    return _call(lib, x, weight, bias, rows)


def _call(lib: Library, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    n, k = weight.shape
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
    given = 0 if bias is None else bias.data_ptr()
    lib.linear(_DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), given, y.data_ptr(), (rows, n, k))
    return y


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual + linear(x, weight, bias)


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return reference.linear_exact(x, weight, bias)
