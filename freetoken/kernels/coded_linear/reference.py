"""Coded linear by decoding some rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedWeight, WeightFormat

RANK = 0
AT_ONCE = 1 << 24
"""Numbers that are decoded at once."""


def supports(device_type: str) -> bool:
    return True


def takes(fmt: WeightFormat, shape: tuple[int, int]) -> bool:
    return False


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    given = x.float() if weight.columns is None else x.float()[..., weight.columns]
    out = torch.empty((*x.shape[:-1], rows), device=x.device)
    step = max(1, AT_ONCE // columns)
    for first in range(0, rows, step):
        some = torch.arange(first, min(first + step, rows), device=x.device)
        out[..., first : first + len(some)] = given @ weight.decode(some).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
