"""The convolution as K shifted products."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.activation import activate

RANK = 0


def supports(device_type: str) -> bool:
    return True


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, activation: str) -> Tensor:
    length = x.shape[1]
    inputs = torch.cat([state.transpose(1, 2), x.to(state.dtype)], dim=1)
    state.copy_(inputs[:, length:].transpose(1, 2))
    inputs = inputs.float()
    total = inputs[:, :length] * weight[0]
    for tap in range(1, weight.shape[0]):
        total = total + inputs[:, tap : tap + length] * weight[tap]
    return activate(activation, total)
