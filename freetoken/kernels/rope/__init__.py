"""Rotary position embedding on the first `2 r` of D dimensions, halves paired (i, i + r).

    rotate(x, cos, sin)    x [T, N, D], cos and sin float32 [T, r] -> [T, N, D] in x's dtype

Computed in float32, rounded once; dimensions beyond 2 r pass through.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.rope import reference, triton

MAKERS = (reference, triton)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).rotate(x, cos, sin)
    return out
