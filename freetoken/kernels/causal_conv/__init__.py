"""Depthwise causal convolution over tokens, with the last inputs carried between calls.

    causal_conv(x, state, weight, activation)
        x        [B, n, C]      n new inputs of B sequences
        state    [B, C, K - 1]  the inputs before them, oldest first      (mutated: the last K - 1 inputs)
        weight   float32 [K, C]
        Returns  float32 [B, n, C], activation applied (a name of kernels.activation)

Sums run over the K taps in one order, so results don't depend on how tokens are cut into calls.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.causal_conv import reference, triton

MAKERS = (reference, triton)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, activation: str = "silu") -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).causal_conv(x, state, weight, activation)
    return out
