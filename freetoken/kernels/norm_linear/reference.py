"""Norm, then projection, each by its own contract."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.linear import linear
from freetoken.kernels.rms_norm import rms_norm

RANK = 0


def supports(device_type: str) -> bool:
    return True


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(rms_norm(x, norm, eps), weight, bias)
