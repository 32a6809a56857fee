"""The four-bit float e2m1: its sixteen values, and the nearest one."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def values(codes: Tensor) -> Tensor:
    """uint8 codes -> float32."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    return table[codes.long()]


def nearest(x: Tensor) -> Tensor:
    """Codes of the nearest values; beyond 6 saturates."""
    code = torch.bucketize(x.abs().contiguous(), torch.tensor(_MIDDLES), out_int32=True)
    return (code + 8 * (x < 0).int()).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [.., n], low nibble first -> codes [.., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Codes [.., 2 n] -> uint8 [.., n], low nibble first."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
