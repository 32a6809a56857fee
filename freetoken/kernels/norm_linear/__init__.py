"""A projection of a normed input: y = linear(rms_norm(x)).

    norm_linear(x, norm, eps, weight, bias)
        x       16-bit or float32 [T, H]    norm float32 [H], offset included
        weight  [N, H] of x's dtype         bias [N] or None
        Returns [T, N] in x's dtype

Rounding points: the normed row once to x's dtype, the sum once. Neither mutates nor syncs.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.norm_linear import native, reference, triton

MAKERS = (reference, native, triton)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).norm_linear(x, norm, eps, weight, bias)
    return out
