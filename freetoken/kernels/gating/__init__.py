"""Element by element: what stands between the products of a layer.

    act_mul(activation, gate, up)         [T, W] each, views of one product -> [T, W] in their dtype
    sigmoid_mul(x, gate)                  [T, N, D] each, gate a view -> x * sigmoid(gate) in x's dtype
    add_routed(h, routed, shared)         h [T, H], routed float32 [T, H] -> h + routed, in h's dtype
        shared   (y [T, H], gate [T, 1] a view) or None: y * sigmoid(gate) is added to routed first

    widen(x)                              [.., W] -> the same numbers in float32

Everything inside is float32; act_mul and sigmoid_mul round once, add_routed the sum of experts, then its
own. Neither mutates nor syncs.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.gating import native, reference, triton

MAKERS = (reference, native, triton)


def act_mul(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, gate.device.type).act_mul(activation, gate, up)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).sigmoid_mul(x, gate)
    return out


def add_routed(h: Tensor, routed: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, h.device.type).add_routed(h, routed, shared)
    return out


def widen(x: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).widen(x)
    return out
