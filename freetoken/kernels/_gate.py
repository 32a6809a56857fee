"""act(g) * u in Triton, as core.model_config.Activation says; `kernels.activation` is its reference."""

from __future__ import annotations

import math
from typing import Any

from freetoken.core.model_config import GATED, Activation
from freetoken.kernels._triton import jit, tl

KINDS = dict(zip(GATED, (0, 0, 1, 2, 3), strict=True))


@jit
def gate_up(g, u, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """float32; KIND as in KINDS, LIMIT None = not clamped."""
    if KIND == 0:
        if LIMIT is not None:
            g = tl.minimum(g, LIMIT)
            u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
        y = g / (1.0 + tl.exp(-ALPHA * g)) * (u + OFFSET)
    elif KIND == 1:
        y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif KIND == 2:
        z = 2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g)
        y = g / (1.0 + tl.exp(-z)) * u
    else:
        y = tl.maximum(g, 0.0) * u
    return y


def gate_consts(act: Activation) -> dict[str, Any]:
    """KIND, ALPHA, LIMIT and OFFSET of `gate_up`."""
    return {
        "KIND": KINDS[act.name],
        "ALPHA": float(act.alpha),
        "LIMIT": float(act.limit) if math.isfinite(act.limit) else None,
        "OFFSET": float(act.up_offset),
    }
