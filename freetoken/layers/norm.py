"""Root mean square norms. The weight is float32 and already includes a family's offset of one."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.rms_norm import rms_norm


class RMSNorm:
    """Norm over the last axis; weight [D]."""

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight.float() + offset
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
