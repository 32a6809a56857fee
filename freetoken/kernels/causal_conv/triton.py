"""The convolution on a CUDA device: outputs first, then the state moves on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, card, jit, power_of_two, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.causal_conv import reference

RANK = 20


@jit(varying=("n", "x_outer"))
def convolve(
    x,
    state,
    weight,
    out,
    n,
    x_outer,
    x_row,
    state_outer,
    C,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SILU: tl.constexpr,
):
    seq = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    real = (channel < C)[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    for tap in tl.static_range(K):
        source = row - (K - 1) + tap
        new = tl.load(
            x + seq * x_outer + source.to(tl.int64)[:, None] * x_row + channel[None, :],
            mask=((source >= 0) & (source < n))[:, None] & real,
            other=0.0,
        )
        if K > 1:
            new = new.to(state.dtype.element_ty)
        # Only the first rows look back into the state, whose taps lie side by side: narrow loads.
        if tl.program_id(0) * BT + tap < K - 1:
            old = tl.load(
                state + seq * state_outer + channel[None, :] * (K - 1) + (source + (K - 1))[:, None],
                mask=(source < 0)[:, None] & real,
                other=0.0,
            )
            new = tl.where((source < 0)[:, None], old, new)
        factor = tl.load(weight + tap * C + channel, mask=channel < C, other=0.0)
        total += new.to(tl.float32) * factor[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    to = out + (seq * n + row.to(tl.int64)[:, None]) * C + channel[None, :]
    tl.store(to, total, mask=(row < n)[:, None] & real)


@jit(varying=("n",))
def move_on(x, state, n, x_outer, x_row, state_outer, C, K: tl.constexpr, BC: tl.constexpr):
    """The last K - 1 of the state's and the new inputs become the state; a thread owns a channel."""
    seq = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    spot = state + seq * state_outer + channel * (K - 1)
    for tap in tl.static_range(K - 1):
        source = n - (K - 1) + tap
        if source >= 0:
            at = x + seq * x_outer + source.to(tl.int64) * x_row + channel
            new = tl.load(at, mask=channel < C).to(state.dtype.element_ty)
        else:
            new = tl.load(spot + source + (K - 1), mask=channel < C)
        tl.store(spot + tap, new, mask=channel < C)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, activation: str) -> Tensor:
    plain_layout = x.stride(-1) == 1 and state[0].is_contiguous() and weight.is_contiguous()
    if activation not in ("silu", "swish") or not plain_layout or not x.numel():
        return reference.causal_conv(x, state, weight, activation)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for launch in plan(x, state, weight, out, card(x.device)):
        launch()
    return out


def plan(x: Tensor, state: Tensor, weight: Tensor, out: Tensor, where: Card) -> list[Launch]:
    seqs, n, channels = x.shape
    taps = weight.shape[0]
    wide, tall = min(128, power_of_two(channels)), min(16, power_of_two(n))
    shape = (n, x.stride(0), x.stride(1), state.stride(0), channels)
    grid = (-(-n // tall), -(-channels // wide), seqs)
    consts = {"K": taps, "BT": tall, "BC": wide, "SILU": True}
    found = [Launch(convolve, grid, (x, state, weight, out, *shape), consts)]
    if taps > 1:
        grid = (-(-channels // wide), seqs)
        found.append(
            Launch(move_on, grid, (x, state, *shape), {"K": taps, "BC": wide}, warps=wide // 32 or 1)
        )
    return found


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for n, channels in ((8192, 8192), (3, 96)):
        x, state = (torch.empty(s, dtype=dtype, device="meta") for s in ((1, n, channels), (1, channels, 3)))
        weight, out = (torch.empty(s, device="meta") for s in ((4, channels), (1, n, channels)))
        yield lambda where, a=(x, state, weight, out): plan(*a, where)
