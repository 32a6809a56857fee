"""Linear by torch; exact by blocks of one fixed shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.kernels._blocks import to_blocks

RANK = 0


def supports(device_type: str) -> bool:
    return True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual + F.linear(x, weight, bias)


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight_t = weight.float().t()
    out = torch.empty(0, weight.shape[0], device=x.device)
    if x.shape[0]:
        out = torch.cat([block @ weight_t for block in to_blocks(x)])[: x.shape[0]]
    return out if bias is None else out + bias.float()


def place(weight: Tensor) -> Tensor:
    return weight
