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


def octets(x: Tensor) -> Tensor:
    """float32 x as int8 says it: per 32 neighbours, multiples of their largest magnitude / 127.

    NaN and infinity make NaN of all 32; neighbours below 1e-36 are zero.
    """
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    times = torch.full_like(largest, 127.0) / largest  # a true quotient, as `127.0 / largest` is not
    codes = (blocks * times).round().where(largest >= 1e-36, 0.0)
    codes = codes.where(torch.isfinite(largest), torch.nan)
    return (codes * (largest / 127.0)).flatten(-2)[..., : x.shape[-1]]


def every_number(weight: CodedWeight) -> Tensor:
    return weight.decode(torch.arange(weight.shape[0]))


def rows_of(weight: CodedWeight, ids: Tensor) -> Tensor:
    return weight.decode(ids)


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None, int8: bool = False) -> Tensor:
    rows, columns = weight.shape
    given = x.float() if weight.columns is None else x.float()[..., weight.columns]
    given = octets(given) if int8 else given
    out = torch.empty((*x.shape[:-1], rows), device=x.device)
    step = max(1, AT_ONCE // columns)
    for first in range(0, rows, step):
        some = torch.arange(first, min(first + step, rows), device=x.device)
        out[..., first : first + len(some)] = given @ weight.decode(some).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
