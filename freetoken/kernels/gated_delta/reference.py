"""The gated delta rule by torch.

The chunked form: with c_i the summed log decay inside a chunk, the corrections u_i of its tokens obey
    u_i + sum_{j<i} beta_i exp(c_i - c_j) (k_i . k_j) u_j = beta_i (v_i - exp(c_i) k_i S)
a unit lower triangular system, solved at once for the part without S and the factor of S. Only the
chain of chunk states is sequential.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

RANK = 0
_EPS = 1e-6


def supports(device_type: str) -> bool:
    return True


def _prepare(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Normalise, scale q and repeat key heads to the value heads: [.., Hv, Dk] each."""
    both = torch.stack([q, k])
    both = both * torch.rsqrt((both * both).sum(-1, keepdim=True) + _EPS)
    if heads != q.shape[-2]:
        both = both.unsqueeze(-2).expand(*both.shape[:-1], heads // q.shape[-2], -1).flatten(-3, -2)
    return both[0] * q.shape[-1] ** -0.5, both[1]


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    q, k = _prepare(q, k, v.shape[-2])
    state.mul_(g.exp()[..., None, None])
    error = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.unsqueeze(-1)
    state.add_(k.unsqueeze(-1) * error.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def chunked(
    inputs: tuple[Tensor, ...],
    state: Tensor,
    cuts: Sequence[int],
    chunk: int,
    saves: Sequence[tuple[int, Tensor]] = (),
) -> Tensor:
    q, k, v, g, beta = inputs
    length, heads = v.shape[0], v.shape[1]
    q, k = _prepare(q, k, heads)
    starts = grid(length, cuts, chunk)[:-1]
    rows, used = _grid(length, starts, v.device)
    q, k, v = (_cut(x, rows, used) for x in (q, k, v))  # [C, Hv, c, D]
    g, beta = (_cut(x.unsqueeze(-1), rows, used).squeeze(-1) for x in (g, beta))  # [C, Hv, c]

    sums = g.cumsum(-1)
    future = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=v.device).triu(1)
    decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    grown = sums.exp().unsqueeze(-1)
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * decay
    right = torch.cat([v * beta.unsqueeze(-1), k_beta * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    base, factor = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]

    within = (q @ k.transpose(-1, -2)) * decay
    q_grown = q * grown
    k_left = (k * (sums[..., -1:] - sums).exp().unsqueeze(-1)).transpose(-1, -2)
    total = sums[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for i, start in enumerate(starts):
        for copy in (copy for offset, copy in saves if offset == start):
            copy.copy_(state)
        update = base[i] - factor[i] @ state
        torch.add(q_grown[i] @ state, within[i] @ update, out=out[i])
        state.mul_(total[i]).add_(k_left[i] @ update)
    return out.transpose(1, 2)[used]


def grid(length: int, cuts: Sequence[int], chunk: int) -> list[int]:
    """Where chunks start, and the end: anew at every cut."""
    edges = [0, *cuts, length]
    starts = [s for a, b in zip(edges, edges[1:], strict=False) for s in range(a, b, chunk)]
    return [*starts, length]


def _grid(length: int, starts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row index int64 [C, c] of each chunk's tokens and which of them exist, bool [C, c]."""
    ends = np.array([*starts[1:], length])
    width = int((ends - starts).max())
    rows = np.array(starts)[:, None] + np.arange(width)
    used = rows < ends[:, None]
    rows = np.minimum(rows, length - 1)
    return torch.from_numpy(rows).to(device), torch.from_numpy(used).to(device)


def _cut(x: Tensor, rows: Tensor, used: Tensor) -> Tensor:
    """[n, Hv, D] -> [C, Hv, c, D], zero where a chunk is shorter: such tokens change no state."""
    return torch.where(used[..., None, None], x[rows], 0.0).transpose(1, 2).contiguous()
