"""Coded linear by the native library: codes become numbers in registers, memory is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedWeight, WeightFormat
from freetoken.kernels.coded_linear import reference
from freetoken.native.library import library

RANK = 10
MOST_ROWS = 32
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def supports(device_type: str) -> bool:
    return device_type == "cpu" and library() is not None


def takes(fmt: WeightFormat, shape: tuple[int, int]) -> bool:
    lib = library()
    size = 0 if lib is None else lib.matrix_bytes(fmt.name, *shape)
    return size > 0 and size == fmt.matrix_bytes(*shape)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    lib = library()
    if lib is None or x.dtype not in _DTYPES or not takes(weight.fmt, weight.shape):
        return reference.coded_linear(x, weight, bias)
    rows, columns = weight.shape
    given = (x if weight.columns is None else x[..., weight.columns]).reshape(-1, columns).contiguous()
    out = torch.empty((given.shape[0], rows), dtype=x.dtype)
    extra = 0 if bias is None else bias.contiguous().data_ptr()
    for first in range(0, given.shape[0], MOST_ROWS):
        some = given[first : first + MOST_ROWS]
        lib.coded_linear(
            (weight.fmt.name, _DTYPES[x.dtype]),
            (some.data_ptr(), weight.packed.data_ptr(), extra, out[first:].data_ptr()),
            (len(some), rows, columns),
        )
    return out.view(*x.shape[:-1], rows)
