"""The activations that models name, on float32 tensors, built so that bits don't depend on neighbours.

torch's sigmoid, silu, softplus and gelu take a vector path for the bulk of a tensor and scalar libm for
its tail (and for strided input), whose last bits differ. exp, log1p, tanh and erf have one path on
contiguous data; the rest here are single IEEE operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from freetoken.core.model_config import Activation


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32."""
    return x.float().contiguous().neg().exp().add(1.0).reciprocal()


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x) in float32."""
    x = x.float().contiguous()
    return x / x.neg().exp().add(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float32, without overflow."""
    x = x.float().contiguous()
    return x.clamp(min=0.0) + x.abs().neg().exp().log1p()


def _gelu(x: Tensor) -> Tensor:
    x = x.float().contiguous()
    return x * 0.5 * (x * 0.5**0.5).erf().add(1.0)


def _gelu_tanh(x: Tensor) -> Tensor:
    x = x.float().contiguous()
    inner = (x * x * x * 0.044715 + x) * (2.0 / torch.pi) ** 0.5
    return x * 0.5 * inner.tanh().add(1.0)


def _relu(x: Tensor) -> Tensor:
    return x.float().clamp(min=0.0)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
}
NAMES = tuple(_ACTIVATIONS)


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation of NAMES; float32, contiguous."""
    return _ACTIVATIONS[name](x)


def gated(act: Activation, g: Tensor, u: Tensor) -> Tensor:
    """act(g) * u in float32, clamped and shifted as `Activation` says."""
    if act.name not in ("silu", "swish"):
        return activate(act.name, g) * u
    g, u = g.float().contiguous(), u.float()
    if act.limit < math.inf:
        g, u = g.clamp(max=act.limit), u.clamp(-act.limit, act.limit)
    share = g / (g * -act.alpha).exp().add(1.0)
    return share * (u + act.up_offset) if act.up_offset else share * u
