"""Norm, router product, softmax and the choice of experts: what a row visits.

    route(h, norm, eps, weight, top_k, normalise, live, bias)
        h       [T, H]          norm float32 [H]
        weight  float32 [E, H]  bias float32 [E] or None    live bool [T]
        Returns x [T, H] normed, in h's dtype; ids int32 [T, top_k]; weights float32 [T, top_k]

Softmax over all E in float32; `normalise` makes the chosen weights sum to one. Equal probabilities go to
the lowest expert. ids ascend within a row, -1 with weight 0 for dead rows. Neither mutates nor syncs.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.router import native, reference, triton

MAKERS = (reference, native, triton)


def route(
    h: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    top_k: int,
    normalise: bool,
    live: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    maker = choose(MAKERS, h.device.type)
    out: tuple[Tensor, Tensor, Tensor] = maker.route(h, norm, eps, weight, top_k, normalise, live, bias)
    return out


def choose_experts(logits: Tensor, top_k: int, normalise: bool, live: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, weights) from float32 logits [T, E], as `route` chooses."""
    maker = choose(MAKERS, logits.device.type)
    out: tuple[Tensor, Tensor] = maker.choose_experts(logits, top_k, normalise, live)
    return out
