"""Rotation on a CUDA device, one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.rope import reference

RANK = 20


@jit
def rotate_heads(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, DP)
    inside = (head < N)[:, None] & (dim < D)[None, :]
    is_first, is_turned = dim < R, dim < 2 * R
    angle = tl.where(is_first, dim, dim - R)
    c = tl.load(cos + row * R + angle, mask=is_turned, other=1.0)[None, :]
    s = tl.load(sin + row * R + angle, mask=is_turned, other=0.0)[None, :]
    partner = tl.where(is_first, dim + R, dim - R)
    at = x + row * row_stride + head[:, None] * head_stride
    own = tl.load(at + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside & is_turned[None, :], other=0.0).to(tl.float32)
    value = own * c + other * tl.where(is_first[None, :], -s, s)
    value = tl.where(is_turned[None, :], value, own)
    to = out + (row * N + head[:, None]) * D + dim[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.stride(-1) != 1 or not x.numel():
        return reference.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for launch in plan(x, cos, sin, out, card(x.device)):
        launch()
    return out


def plan(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, where: Card) -> list[Launch]:
    rows, heads, dim = x.shape
    wide = power_of_two(dim)
    block = max(1, min(power_of_two(heads), 1024 // wide))
    args = (x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1))
    consts = {"N": heads, "D": dim, "DP": wide, "R": cos.shape[-1], "BH": block}
    return [Launch(rotate_heads, (rows, -(-heads // block)), args, consts)]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for heads, dim, turning in ((32, 128, 64), (16, 256, 32), (3, 80, 40)):
        x = torch.empty(64, heads, dim, dtype=dtype, device="meta")
        angle = torch.empty(64, turning, device="meta")
        yield lambda where, x=x, angle=angle: plan(x, angle, angle, x, where)
