"""Coded linear by the native library: for few rows codes become numbers in registers and are read once."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedWeight, WeightFormat
from freetoken.kernels.coded_linear import reference
from freetoken.native.library import Library, library

RANK = 10
MOST_ROWS = 16
AT_ONCE = 1 << 22
"""Numbers that are decoded at once: they stay in the cache."""
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def supports(device_type: str) -> bool:
    return device_type == "cpu" and library() is not None


def takes(fmt: WeightFormat, shape: tuple[int, int]) -> bool:
    lib = library()
    size = 0 if lib is None else lib.matrix_bytes(fmt.name, *shape)
    return size > 0 and size == fmt.matrix_bytes(*shape)


def every_number(weight: CodedWeight) -> Tensor:
    lib = library()
    if lib is None or not takes(weight.fmt, weight.shape):
        return reference.every_number(weight)
    out = torch.empty(weight.shape)
    places = weight.packed.data_ptr(), out.data_ptr()
    lib.coded_numbers(weight.fmt.name, places, weight.shape, (0, weight.shape[0]))
    return out


def rows_of(weight: CodedWeight, ids: Tensor) -> Tensor:
    lib = library()
    if lib is None or len(ids) > MOST_ROWS or not takes(weight.fmt, weight.shape):
        return reference.rows_of(weight, ids)
    out = torch.empty(len(ids), weight.shape[1])
    place, step = out.data_ptr(), 4 * weight.shape[1]
    for at, row in enumerate(ids.tolist()):
        places = weight.packed.data_ptr(), place + at * step
        lib.coded_numbers(weight.fmt.name, places, weight.shape, (row, row + 1))
    return out


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, int8: bool = False) -> Tensor:
    lib = library()
    if lib is None or x.dtype not in _DTYPES or not takes(weight.fmt, weight.shape):
        return reference.coded_linear(x, weight, bias)
    int8 = int8 and lib.has_int8(weight.fmt.name)
    rows, columns = weight.shape
    given = (x if weight.columns is None else x[..., weight.columns]).reshape(-1, columns).contiguous()
    kind = weight.fmt.name, _DTYPES[x.dtype]
    if given.shape[0] > MOST_ROWS and not lib.takes_any_rows(kind, int8=int8):
        return _by_numbers(lib, given, weight, bias).view(*x.shape[:-1], rows)
    out = torch.empty((given.shape[0], rows), dtype=x.dtype)
    lib.coded_linear(
        kind,
        (
            given.data_ptr(),
            weight.packed.data_ptr(),
            0 if bias is None else bias.contiguous().data_ptr(),
            out.data_ptr(),
        ),
        (given.shape[0], rows, columns),
        int8=int8,
    )
    return out.view(*x.shape[:-1], rows)


def _by_numbers(lib: Library, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """Many rows: some of W as float32 at a time, which a GEMM multiplies faster than codes can be."""
    rows, columns = weight.shape
    wide, step = x.float(), max(1, AT_ONCE // columns)
    out = torch.empty((x.shape[0], rows))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        numbers = torch.empty((last - first, columns))
        places = weight.packed.data_ptr(), numbers.data_ptr()
        lib.coded_numbers(weight.fmt.name, places, weight.shape, (first, last))
        out[:, first:last] = wide @ numbers.t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
