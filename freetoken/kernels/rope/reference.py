"""Rotation by torch in float32."""

from __future__ import annotations

import torch
from torch import Tensor

RANK = 0


def supports(device_type: str) -> bool:
    return True


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(t.to(x.dtype) for t in turned), x[..., 2 * half :]], dim=-1)
