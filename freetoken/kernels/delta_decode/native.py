"""One token of gated DeltaNet in the native library: states are read and written in place, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freetoken.kernels._native import DTYPES
from freetoken.kernels._native import RANK as RANK
from freetoken.kernels._native import supports as supports
from freetoken.kernels.delta_decode import reference
from freetoken.kernels.delta_decode.reference import gated_norm as gated_norm
from freetoken.kernels.delta_decode.reference import gates as gates
from freetoken.native.library import library
from freetoken.native.ops import Delta


def delta_decode(
    inputs: Any, layer: Any, conv: Tensor, delta: Tensor, state_ids: Tensor, fresh: Tensor
) -> Tensor:
    lib = library()
    qkv, parts = inputs.qkv, (inputs.qkv, inputs.z, inputs.b, inputs.a)
    rows, strides = len(qkv), {part.stride(0) for part in parts}
    usable = len(strides) == 1 and all(part.stride(1) == 1 for part in parts)
    alike = conv.dtype == qkv.dtype and layer.activation in ("silu", "swish")
    whole = conv[0].is_contiguous() and delta[0].is_contiguous()
    if lib is None or not rows or not (usable and alike and whole):
        return reference.delta_decode(inputs, layer, conv, delta, state_ids, fresh)
    k_heads, k_dim, v_heads, v_dim = layer.heads
    out = torch.empty((rows, v_heads * v_dim), dtype=qkv.dtype)
    state_ids, fresh = state_ids.contiguous(), fresh.contiguous()
    given = (*parts, conv, out, delta, layer.conv, layer.decay, layer.dt_bias, layer.norm, state_ids, fresh)
    lib.run(
        Delta(
            *(t.data_ptr() for t in given), rows, qkv.stride(0), conv.stride(0), delta.stride(0),
            DTYPES[qkv.dtype], layer.conv.shape[0], k_heads, k_dim, v_heads, v_dim, layer.eps,
        )
    )  # fmt: skip
    return out
