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


def chunked(inputs: tuple[Tensor, ...], state: Tensor, cuts: Sequence[int], chunk: int) -> Tensor:
    q, k, v, g, beta = inputs
    if (
        chunk != _chunks.CHUNK
        or max(state.shape[1:]) > _WIDEST
        or not state.is_contiguous()
        or not v.shape[0]
    ):
        return reference.chunked(inputs, state, cuts, chunk)
    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    inputs = (q, k, v, g.contiguous(), beta.contiguous())
    starts = torch.tensor(grid(v.shape[0], cuts, chunk), dtype=torch.int32).to(v.device, non_blocking=True)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for first in range(0, starts.shape[0] - 1, _AT_ONCE):
        for launch in _chunks.plan(inputs, state, starts[first : first + _AT_ONCE + 1], out, card(v.device)):
            launch()
    return out


def grid(length: int, cuts: Sequence[int], chunk: int) -> list[int]:
    """Where chunks start, and the end: anew at every cut."""
    edges = [0, *cuts, length]
    starts = [s for a, b in zip(edges, edges[1:], strict=False) for s in range(a, b, chunk)]
    return [*starts, length]


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    for key_heads, heads, k_dim, v_dim in ((16, 32, 128, 128), (2, 4, 16, 16), (3, 3, 80, 112)):
        n = 512
        q = torch.empty(n, key_heads, k_dim, device="meta")
        v, g = torch.empty(n, heads, v_dim, device="meta"), torch.empty(n, heads, device="meta")
        state, starts = (
            torch.empty(heads, k_dim, v_dim, device="meta"),
            torch.empty(9, dtype=torch.int32, device="meta"),
        )
        yield lambda where, a=((q, q, v, g, g), state, starts, v): _chunks.plan(*a, where)
