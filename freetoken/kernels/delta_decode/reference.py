"""Gather the states, step, scatter them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.activation import sigmoid, silu, softplus
from freetoken.kernels.causal_conv import causal_conv
from freetoken.kernels.gated_delta import step
from freetoken.kernels.rms_norm import rms_norm

RANK = 0


def supports(device_type: str) -> bool:
    return True


def delta_decode(
    inputs: Any, layer: Any, conv: Tensor, delta: Tensor, state_ids: Tensor, fresh: Tensor
) -> Tensor:
    k_heads, k_dim, v_heads, v_dim = layer.heads
    conv_in = torch.where(fresh[:, None, None], 0.0, conv.index_select(0, state_ids))
    delta_in = torch.where(fresh[:, None, None, None], 0.0, delta.index_select(0, state_ids))
    mixed = causal_conv(inputs.qkv[:, None], conv_in, layer.conv, layer.activation)[:, 0]
    q, k, v = mixed.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], dim=-1)
    q, k = (part.unflatten(-1, (k_heads, k_dim)) for part in (q, k))
    out = step(q, k, v.unflatten(-1, (v_heads, v_dim)), *gates(inputs, layer), delta_in)
    conv.index_copy_(0, state_ids, conv_in)
    delta.index_copy_(0, state_ids, delta_in)
    return gated_norm(out, inputs, layer)


def gates(inputs: Any, layer: Any) -> tuple[Tensor, Tensor]:
    return layer.decay * softplus(inputs.a.float() + layer.dt_bias), sigmoid(inputs.b)


def gated_norm(out: Tensor, inputs: Any, layer: Any) -> Tensor:
    gate = inputs.z.unflatten(-1, out.shape[1:])
    normed = rms_norm(out, layer.norm, layer.eps) * silu(gate)
    return normed.to(inputs.z.dtype).flatten(1)
