"""The gated delta rule on a CUDA device: many tokens in chunks, some chunks at a time.

The step form is delta_decode's there, so `step` here is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, card
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.gated_delta import _chunks, reference

RANK = 20
# Chunks in flight: enough for every SM, few enough that their parts stay below 200 MB.
_AT_ONCE = 32
_WIDEST = 128


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    return reference.step(q, k, v, g, beta, state)


def chunked(
    inputs: tuple[Tensor, ...],
    state: Tensor,
    cuts: Sequence[int],
    chunk: int,
    saves: Sequence[tuple[int, Tensor]] = (),
) -> Tensor:
    q, k, v, g, beta = inputs
    if (
        chunk != _chunks.CHUNK
        or max(state.shape[1:]) > _WIDEST
        or not state.is_contiguous()
        or not v.shape[0]
    ):
        return reference.chunked(inputs, state, cuts, chunk, saves)
    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    inputs = (q, k, v, g.contiguous(), beta.contiguous())
    grid = reference.grid(v.shape[0], cuts, chunk)
    starts = torch.tensor(grid, dtype=torch.int32).to(v.device, non_blocking=True)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for first in range(0, len(grid) - 1, _AT_ONCE):
        part = slice(first, first + _AT_ONCE + 1)
        launches, states = _chunks.plan(inputs, state, starts[part], out, card(v.device))
        for launch in launches:
            launch()
        held = grid[part][:-1]
        for offset, copy in saves:
            if held[0] <= offset <= held[-1]:
                copy.copy_(states[held.index(offset)])
    return out


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for key_heads, heads, k_dim, v_dim in ((16, 32, 128, 128), (2, 4, 16, 16), (3, 3, 80, 112)):
        n = 512
        q = torch.empty(n, key_heads, k_dim, device="meta")
        v, g = torch.empty(n, heads, v_dim, device="meta"), torch.empty(n, heads, device="meta")
        state, starts = (
            torch.empty(heads, k_dim, v_dim, device="meta"),
            torch.empty(9, dtype=torch.int32, device="meta"),
        )
        yield lambda where, a=((q, q, v, g, g), state, starts, v): _chunks.plan(*a, where)[0]
