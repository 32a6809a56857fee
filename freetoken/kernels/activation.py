"""The activations that a gated MLP may name, on float32 tensors.

Inputs are made contiguous first: torch takes a scalar libm path on strided data and a vector one on
contiguous data, whose last bits differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
NAMES = tuple(_ACTIVATIONS)


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation of NAMES in float32."""
    return _ACTIVATIONS[name](x.float().contiguous())
