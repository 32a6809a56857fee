"""One token of B sequences through gated DeltaNet in two launches: convolution, then everything else.

The second holds a head's whole matrix in a block's registers: it is read once and written once.
`gates` and `gated_norm` serve prompts, one launch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.delta_decode import reference

RANK = 20
_MOST_STATE = 128 * 256


@jit
def convolve_one(
    qkv,
    state,
    weight,
    state_ids,
    fresh,
    mixed,
    row_stride,
    state_stride,
    C,
    K: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    b = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = channel < C
    new = tl.load(qkv + b * row_stride + channel, mask=inside, other=0.0).to(state.dtype.element_ty)
    kept = inside & (tl.load(fresh + b) == 0)
    spot = state + tl.load(state_ids + b) * state_stride + channel * (K - 1)
    total = tl.zeros([BC], tl.float32)
    for tap in tl.static_range(K - 1):
        old = tl.load(spot + tap, mask=kept, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + tap * C + channel, mask=inside, other=0.0)
        if tap > 0:
            tl.store(spot + tap - 1, old, mask=inside)
    if K > 1:
        tl.store(spot + K - 2, new, mask=inside)
    total += new.to(tl.float32) * tl.load(weight + (K - 1) * C + channel, mask=inside, other=0.0)
    tl.store(mixed + b * C + channel, total / (1.0 + tl.exp(-total)), mask=inside)


@jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@jit
def step_and_norm(
    mixed,
    z,
    b_gate,
    a_gate,
    decay,
    dt_bias,
    norm,
    states,
    state_ids,
    fresh,
    out,
    eps,
    C,
    z_stride,
    b_stride,
    a_stride,
    state_stride,
    scale,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    HV: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (HV // HK)
    i, j = tl.arange(0, DKP), tl.arange(0, DVP)
    kept = tl.load(fresh + b) == 0
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    spot = states + tl.load(state_ids + b) * state_stride + head * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(spot, mask=inside & kept, other=0.0)
    row = mixed + b * C
    q = tl.load(row + key_head * DK + i, mask=i < DK, other=0.0)
    k = tl.load(row + HK * DK + key_head * DK + i, mask=i < DK, other=0.0)
    v = tl.load(row + 2 * HK * DK + head * DV + j, mask=j < DV, other=0.0)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    a = tl.load(a_gate + b * a_stride + head).to(tl.float32) + tl.load(dt_bias + head)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_gate + b * b_stride + head).to(tl.float32)))
    state *= tl.exp(tl.load(decay + head) * _softplus(a))
    error = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * error[None, :]
    tl.store(spot, state, mask=inside)
    y = tl.sum(q[:, None] * state, 0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / DV + eps) * tl.load(norm + j, mask=j < DV, other=0.0)
    gate = tl.load(z + b * z_stride + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + (b * HV + head) * DV + j, y.to(out.dtype.element_ty), mask=j < DV)


@jit(varying=("n",))
def gate_rows(
    b_gate, a_gate, decay, dt_bias, g, beta, n, b_stride, a_stride, HV: tl.constexpr, B: tl.constexpr
):
    at = tl.program_id(0) * B + tl.arange(0, B)
    row, head = (at // HV).to(tl.int64), at % HV
    inside = at < n * HV
    a = tl.load(a_gate + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(dt_bias + head, mask=inside, other=0.0)
    b = tl.load(b_gate + row * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(g + at, tl.load(decay + head, mask=inside, other=0.0) * _softplus(a), mask=inside)
    tl.store(beta + at, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


@jit(varying=("n",))
def norm_gate_rows(
    x, z, norm, out, n, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr
):
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    row, head, dim = (at // HV).to(tl.int64), at % HV, tl.arange(0, DVP)
    inside = (at < n * HV)[:, None] & (dim < DV)[None, :]
    y = tl.load(x + at.to(tl.int64)[:, None] * DV + dim[None, :], mask=inside, other=0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / DV + eps)[:, None]
    y = y * tl.load(norm + dim, mask=dim < DV, other=0.0)[None, :]
    source = z + (row * z_stride + head * DV)[:, None] + dim[None, :]
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    y = y * (gate / (1.0 + tl.exp(-gate)))
    to = out + at.to(tl.int64)[:, None] * DV + dim[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=inside)


def delta_decode(
    inputs: Any, layer: Any, conv: Tensor, delta: Tensor, state_ids: Tensor, fresh: Tensor
) -> Tensor:
    _, k_dim, v_heads, v_dim = layer.heads
    if not (
        layer.activation in ("silu", "swish")
        and inputs.qkv.shape[0]
        and power_of_two(k_dim) * power_of_two(v_dim) <= _MOST_STATE
        and conv[0].is_contiguous()
        and delta[0].is_contiguous()
        and layer.conv.is_contiguous()
    ):
        return reference.delta_decode(inputs, layer, conv, delta, state_ids, fresh)
    out = torch.empty(inputs.z.shape[0], v_heads * v_dim, dtype=inputs.z.dtype, device=inputs.z.device)
    for launch in plan(inputs, layer, (conv, delta), (state_ids, fresh), out, card(delta.device)):
        launch()
    return out


def plan(
    inputs: Any,
    layer: Any,
    states: tuple[Tensor, Tensor],
    which: tuple[Tensor, Tensor],
    out: Tensor,
    where: Card,
) -> list[Launch]:
    (conv, delta), (batch, channels) = states, inputs.qkv.shape
    k_heads, k_dim, v_heads, v_dim = layer.heads
    mixed = torch.empty(batch, channels, dtype=torch.float32, device=out.device)
    wide = min(128, power_of_two(channels))
    args = (inputs.qkv, conv, layer.conv, *which, mixed, inputs.qkv.stride(0), conv.stride(0), channels)
    consts = {"K": layer.conv.shape[0], "BC": wide, "PDL": where.pdl}
    first = Launch(convolve_one, (-(-channels // wide), batch), args, consts, warps=max(1, wide // 32))
    args = (mixed, inputs.z, inputs.b, inputs.a, layer.decay, layer.dt_bias, layer.norm, delta, *which, out)
    args += (layer.eps, channels, inputs.z.stride(0), inputs.b.stride(0), inputs.a.stride(0))
    args += (delta.stride(0), k_dim**-0.5)
    consts = {"HK": k_heads, "DK": k_dim, "DKP": power_of_two(k_dim), "HV": v_heads}
    consts |= {"DV": v_dim, "DVP": power_of_two(v_dim), "PDL": where.pdl}
    numbers = consts["DKP"] * consts["DVP"]
    return [
        first,
        Launch(step_and_norm, (v_heads, batch), args, consts, warps=min(16, max(1, numbers // 2048))),
    ]


def gates(inputs: Any, layer: Any) -> tuple[Tensor, Tensor]:
    rows, heads = inputs.a.shape
    g, beta = (torch.empty(rows, heads, dtype=torch.float32, device=inputs.a.device) for _ in range(2))
    if rows:
        for launch in plan_gates(inputs, layer, g, beta):
            launch()
    return g, beta


def plan_gates(inputs: Any, layer: Any, g: Tensor, beta: Tensor) -> list[Launch]:
    (rows, heads), block = g.shape, 256
    args = (inputs.b, inputs.a, layer.decay, layer.dt_bias, g, beta, rows)
    args += (inputs.b.stride(0), inputs.a.stride(0))
    return [Launch(gate_rows, (-(-rows * heads // block),), args, {"HV": heads, "B": block})]


def gated_norm(out: Tensor, inputs: Any, layer: Any) -> Tensor:
    rows, heads, dim = out.shape
    normed = torch.empty(rows, heads * dim, dtype=inputs.z.dtype, device=out.device)
    if rows:
        for launch in plan_norm(out.contiguous(), inputs.z, layer, normed):
            launch()
    return normed


def plan_norm(x: Tensor, z: Tensor, layer: Any, out: Tensor) -> list[Launch]:
    rows, heads, dim = x.shape
    wide = power_of_two(dim)
    block = max(1, 1024 // wide)
    consts = {"HV": heads, "DV": dim, "DVP": wide, "BR": block}
    args = (x, z, layer.norm, out, rows, z.stride(0), layer.eps)
    return [Launch(norm_gate_rows, (-(-rows * heads // block),), args, consts)]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """Qwen3.6's heads, at one and at eight sequences; a small model's."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def one(batch: int, heads: tuple[int, int, int, int]) -> Callable[[Card], list[Launch]]:
        k_heads, k_dim, v_heads, v_dim = heads
        channels = 2 * k_heads * k_dim + v_heads * v_dim
        joined = empty(batch, channels + v_heads * v_dim + 2 * v_heads, dtype=dtype)
        qkv, z, b, a = joined.split([channels, v_heads * v_dim, v_heads, v_heads], 1)
        inputs = SimpleNamespace(qkv=qkv, z=z, b=b, a=a)
        head = empty(v_heads)
        layer = SimpleNamespace(
            conv=empty(4, channels), decay=head, dt_bias=head, norm=empty(v_dim), eps=1e-6, heads=heads
        )
        states = (empty(5, channels, 3, dtype=dtype), empty(5, v_heads, k_dim, v_dim))
        which = (empty(batch, dtype=torch.int64), empty(batch, dtype=torch.bool))
        out, scan = empty(batch, v_heads * v_dim, dtype=dtype), empty(batch, v_heads, v_dim)
        gate = empty(batch, v_heads)
        return lambda where: [
            *plan(inputs, layer, states, which, out, where),
            *plan_gates(inputs, layer, gate, gate),
            *plan_norm(scan, z, layer, out),
        ]

    yield one(1, (16, 128, 32, 128))
    yield one(8, (16, 128, 32, 128))
    yield one(2, (2, 16, 4, 16))
