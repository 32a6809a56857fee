"""y = x W^T + b.

    linear(x, weight, bias)         x [.., K], weight [N, K], bias [N] -> [.., N] in x's dtype; sums at
                                    least in float32, one rounding
    linear_add(x, weight, bias, residual)   residual [.., N] + the same, both rounded
    linear_exact(x, weight, bias)   x [R, K] -> float32 [R, N]; a row's result depends on that row alone

    place(weight)                   the weight where products read it fastest: itself, or a copy; a copy stays

Neither mutates nor syncs.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.linear import native, reference, triton

MAKERS = (reference, native, triton)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).linear(x, weight, bias)
    return out


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).linear_exact(x, weight, bias)
    return out


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).linear_add(x, weight, bias, residual)
    return out


def place(weight: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, weight.device.type).place(weight)
    return out
