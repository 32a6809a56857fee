"""Mirror of `layer.h`: a layer's operations as the native library takes them.

A job is a ctypes structure of addresses, counts and strides; a call runs it. Doesn't know tensors. The
order of fields is the header's; a test compiles the header and compares.
"""

from __future__ import annotations

import ctypes
from typing import Any

_PTR, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class Norm(ctypes.Structure):
    _fields_ = _fields((_PTR, "x weight y"), (_I64, "rows width"), (_F32, "eps"), (_I32, "dtype"))


class Rope(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "qkv out pages q_norm k_norm cos sin positions seq_of page_table live"),
        (_I64, "rows qkv_stride page_stride table_width num_positions"),
        (_I32, "dtype num num_kv dim half page_size gated"),
        (_F32, "eps"),
    )


class Attend(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "q pages out page_table context sinks"),
        (_I64, "seqs page_stride table_width"),
        (_I32, "dtype num num_kv dim page_size window"),
        (_F32, "scale"),
        (_I32, "reserved"),
    )


class Delta(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "qkv z b a conv out delta conv_weight decay dt_bias norm state_ids fresh"),
        (_I64, "rows input_stride conv_stride delta_stride"),
        (_I32, "dtype taps k_heads k_dim v_heads v_dim"),
        (_F32, "eps"),
        (_I32, "reserved"),
    )


class Route(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "h norm weight live x ids weights"),
        (_I64, "rows hidden experts"),
        (_I32, "dtype top_k normalise"),
        (_F32, "eps"),
    )


class Product(ctypes.Structure):
    _fields_ = _fields((_PTR, "x norm w bias residual y"), (_I64, "rows n k"), (_F32, "eps"), (_I32, "dtype"))


class CodedProduct(ctypes.Structure):
    _fields_ = _fields((_PTR, "x w bias y"), (_I64, "rows n k"), (_I32, "format dtype"))


class Moe(ctypes.Structure):
    """`ft_moe`: the routed experts of one layer for some tokens."""

    _fields_ = _fields((_PTR, "x ids weights y"), (_I32, "layer x_dtype tokens top_k visited reserved"))


class Experts(ctypes.Structure):
    _fields_ = _fields((_PTR, "executor"), (ctypes.POINTER(Moe), "moe"), (_I32, "deadline_ms reserved"))


class ActMul(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "gate up y"), (_I64, "rows width gate_stride up_stride"), (_I32, "dtype activation")
    )


class SigmoidMul(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "x gate y"),
        (_I64, "rows heads dim x_row x_head gate_row gate_head"),
        (_I32, "dtype reserved"),
    )


class AddRouted(ctypes.Structure):
    _fields_ = _fields(
        (_PTR, "h routed shared gate y"), (_I64, "rows width gate_row"), (_I32, "dtype reserved")
    )


class Widen(ctypes.Structure):
    _fields_ = _fields((_PTR, "x y"), (_I64, "rows width"), (_I32, "dtype reserved"))


class Step(ctypes.Structure):
    _fields_ = _fields((_PTR, "run job"))


JOBS: dict[type[ctypes.Structure], str] = {
    Norm: "ft_norm_rows",
    Rope: "ft_rope_store",
    Attend: "ft_attend_decode",
    Delta: "ft_delta_decode",
    Route: "ft_route_rows",
    Product: "ft_product_run",
    CodedProduct: "ft_coded_product_run",
    Experts: "ft_experts_run",
    ActMul: "ft_gate_act_mul",
    SigmoidMul: "ft_gate_sigmoid_mul",
    AddRouted: "ft_gate_add_routed",
    Widen: "ft_gate_widen",
}


def declare(lib: ctypes.CDLL) -> None:
    """Give the functions their signatures."""
    for job, name in JOBS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_int, ctypes.POINTER(job)]
    lib.ft_program_run.restype = _I64
    lib.ft_program_run.argtypes = [ctypes.c_int, ctypes.POINTER(Step), _I64]
