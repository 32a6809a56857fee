"""By torch, operation after operation."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.activation import activate, sigmoid

RANK = 0


def supports(device_type: str) -> bool:
    return True


def act_mul(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    return (activate(activation, gate) * up).to(gate.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * sigmoid(gate)).to(x.dtype)


def add_routed(h: Tensor, routed: Tensor, shared: tuple[Tensor, Tensor] | None) -> Tensor:
    if shared is not None:
        y, gate = shared
        routed = routed + y.float() * sigmoid(gate)
    return h + routed.to(h.dtype)


def widen(x: Tensor) -> Tensor:
    return x.float()
