"""One launch each, so that a token's layer isn't a dozen of small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.gating import reference

RANK = 20
KINDS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}


@jit
def act_rows(
    gate, up, out, gate_stride, up_stride, W, KIND: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr
):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    g = tl.load(gate + row * gate_stride + col, mask=col < W, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=col < W, other=0.0).to(tl.float32)
    if KIND == 0:
        y = g / (1.0 + tl.exp(-g)) * u
    elif KIND == 1:
        y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif KIND == 2:
        z = 2.0 * 0.7978845608028654 * (g + 0.044715 * g * g * g)
        y = g / (1.0 + tl.exp(-z)) * u
    else:
        y = tl.maximum(g, 0.0) * u
    tl.store(out + row * W + col, y.to(out.dtype.element_ty), mask=col < W)


@jit
def sigmoid_rows(
    x, gate, out, x_row, x_head, gate_row, gate_head, N,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    dim = tl.arange(0, DP)[None, :]
    inside = (head < N) & (dim < D)
    v = tl.load(x + row * x_row + head * x_head + dim, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + head * gate_head + dim, mask=inside, other=0.0).to(tl.float32)
    v = v * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + (row * N + head) * D + dim, v.to(out.dtype.element_ty), mask=inside)


@jit
def add_rows(h, routed, y, gate, out, gate_row, H, BC: tl.constexpr, PDL: tl.constexpr):
    pdl.let_next_start(PDL)
    pdl.await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    at = row * H + col
    total = tl.load(routed + at, mask=col < H, other=0.0)
    if y is not None:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_row).to(tl.float32)))
        total += tl.load(y + at, mask=col < H, other=0.0).to(tl.float32) * share
    total = total.to(out.dtype.element_ty).to(tl.float32)
    total += tl.load(h + at, mask=col < H, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=col < H)


def act_mul(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    if gate.dim() != 2 or gate.stride(1) != 1 or up.stride(1) != 1 or not gate.numel():
        return reference.act_mul(activation, gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for launch in plan_act(activation, gate, up, out, card(out.device)):
        launch()
    return out


def plan_act(activation: str, gate: Tensor, up: Tensor, out: Tensor, where: Card) -> list[Launch]:
    rows, width = gate.shape
    wide = min(1024, power_of_two(width)) if rows > 8 else min(256, power_of_two(width))
    args = (gate, up, out, gate.stride(0), up.stride(0), width)
    consts = {"KIND": KINDS[activation], "BC": wide, "PDL": where.pdl}
    return [Launch(act_rows, (rows, -(-width // wide)), args, consts, warps=max(1, wide // 256))]


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    if x.dim() != 3 or x.stride(2) != 1 or gate.stride(2) != 1 or not x.numel():
        return reference.sigmoid_mul(x, gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for launch in plan_sigmoid(x, gate, out, card(out.device)):
        launch()
    return out


def plan_sigmoid(x: Tensor, gate: Tensor, out: Tensor, where: Card) -> list[Launch]:
    rows, heads, dim = x.shape
    wide = power_of_two(dim)
    block = max(1, min(power_of_two(heads), (1024 if rows > 8 else 256) // wide))
    args = (x, gate, out, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), heads)
    consts = {"D": dim, "DP": wide, "BN": block, "PDL": where.pdl}
    return [Launch(sigmoid_rows, (rows, -(-heads // block)), args, consts, warps=max(1, block * wide // 256))]


def add_routed(h: Tensor, routed: Tensor, shared: tuple[Tensor, Tensor] | None) -> Tensor:
    others = (h, routed) if shared is None else (h, routed, shared[0])
    if not h.numel() or not all(t.is_contiguous() for t in others):
        return reference.add_routed(h, routed, shared)
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    for launch in plan_add(h, routed, shared, out, card(out.device)):
        launch()
    return out


def plan_add(
    h: Tensor, routed: Tensor, shared: tuple[Tensor, Tensor] | None, out: Tensor, where: Card
) -> list[Launch]:
    rows, width = h.shape
    wide = min(1024, power_of_two(width)) if rows > 8 else min(256, power_of_two(width))
    y, gate = shared or (None, None)
    args = (h, routed, y, gate, out, 0 if gate is None else gate.stride(0), width)
    consts = {"BC": wide, "PDL": where.pdl}
    return [Launch(add_rows, (rows, -(-width // wide)), args, consts, warps=max(1, wide // 256))]


def widen(x: Tensor) -> Tensor:
    return reference.widen(x)


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for rows in (1, 512):
        products, h, routed = empty(rows, 1025), empty(rows, 2048), empty(rows, 2048, dtype=torch.float32)
        heads = empty(rows, 16, 512)
        yield lambda where, p=products, h=h, r=routed, heads=heads: [
            *plan_act("silu", p[:, :512], p[:, 512:1024], p[:, :512], where),
            *plan_sigmoid(heads[..., :256], heads[..., 256:], heads[..., :256], where),
            *plan_add(h, r, (h, p[:, 1024:]), h, where),
            *plan_add(h, r, None, h, where),
        ]
