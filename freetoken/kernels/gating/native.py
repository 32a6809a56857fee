"""By the native library, row by row, so that a step of the CPU needs nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._native import DTYPES, address
from freetoken.kernels._native import RANK as RANK
from freetoken.kernels._native import supports as supports
from freetoken.kernels.gating import reference
from freetoken.native.library import GELU, GELU_TANH, RELU, SWIGLU, library
from freetoken.native.ops import ActMul, AddRouted, SigmoidMul, Widen

KINDS = {"silu": SWIGLU, "swish": SWIGLU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH, "relu": RELU}


def _fits(*tensors: Tensor) -> bool:
    """Last axes without gaps, one type that the library knows, something to do."""
    first = tensors[0]
    return (
        first.dtype in DTYPES
        and first.numel() > 0
        and all(t.dtype == first.dtype and t.stride(-1) == 1 for t in tensors)
    )


def act_mul(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    lib = library()
    if lib is None or gate.dim() != 2 or activation not in KINDS or not _fits(gate, up):
        return reference.act_mul(activation, gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    places, strides = (t.data_ptr() for t in (gate, up, out)), (gate.stride(0), up.stride(0))
    lib.run(ActMul(*places, *gate.shape, *strides, DTYPES[gate.dtype], KINDS[activation]))
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    lib = library()
    if lib is None or x.dim() != 3 or not _fits(x, gate):
        return reference.sigmoid_mul(x, gate)
    out = torch.empty(x.shape, dtype=x.dtype)
    places, strides = (t.data_ptr() for t in (x, gate, out)), (*x.stride()[:2], *gate.stride()[:2])
    lib.run(SigmoidMul(*places, *x.shape, *strides, DTYPES[x.dtype]))
    return out


def add_routed(h: Tensor, routed: Tensor, shared: tuple[Tensor, Tensor] | None) -> Tensor:
    y, gate = shared or (None, None)
    lib, whole = library(), [t for t in (h, routed, y) if t is not None]
    alike = _fits(*(t for t in (h, y) if t is not None)) and routed.dtype == torch.float32
    if lib is None or not alike or (gate is not None and gate.dtype != h.dtype):
        return reference.add_routed(h, routed, shared)
    if not all(t.is_contiguous() for t in whole):
        return reference.add_routed(h, routed, shared)
    out, step = torch.empty_like(h), 0 if gate is None else gate.stride(0)
    places = (h.data_ptr(), routed.data_ptr(), address(y), address(gate), out.data_ptr())
    lib.run(AddRouted(*places, h.numel() // h.shape[-1], h.shape[-1], step, DTYPES[h.dtype]))
    return out


def widen(x: Tensor) -> Tensor:
    lib = library()
    if lib is None or x.dtype == torch.float32 or not x.is_contiguous() or not _fits(x):
        return reference.widen(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    lib.run(Widen(x.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], DTYPES[x.dtype]))
    return out
