"""Root mean square norm over the last axis.

    rms_norm(x, weight, eps)    x [.., D], weight float32 [D] -> [.., D] in x's dtype

Computed in float32, weight included, with one rounding at the end; row-invariant.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.rms_norm import native, reference, triton

MAKERS = (reference, native, triton)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).rms_norm(x, weight, eps)
    return out
