"""Norm and projection of a few rows in one call of the native library."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.linear import native as linear
from freetoken.kernels.norm_linear import reference
from freetoken.native.library import library

RANK = 10


def supports(device_type: str) -> bool:
    return linear.supports(device_type)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    lib = library()
    if lib is None or not linear.takes(x, weight, bias):
        return reference.norm_linear(x, norm, eps, weight, bias)
    return linear.call(lib, x, weight, bias, norm=(norm, eps))
