"""The gated delta rule, in two forms that agree up to rounding.

One head keeps a matrix S [Dk, Dv]. Each token decays it, reads what it holds for the key, and writes
the error back:  S = exp(g) S;  S = S + k (beta (v - k S))^T;  o = q S.  q and k are L2-normalised and
q is scaled by Dk^-1/2 here. A key head serves Hv / Hk neighbouring value heads.

    step(q, k, v, g, beta, state)               one token of B sequences
        q, k [B, Hk, Dk]  v [B, Hv, Dv]  g, beta [B, Hv]  state [B, Hv, Dk, Dv] (mutated); all float32
        Returns float32 [B, Hv, Dv]
    chunked(q, k, v, g, beta, state, cuts, saves)   n tokens of one sequence, in chunks of CHUNK
        q, k [n, Hk, Dk]  v [n, Hv, Dv]  g, beta [n, Hv]  state [Hv, Dk, Dv] (mutated); all float32
        cuts: ascending offsets in (0, n) where the grid of chunks starts anew
        saves: (offset, copy) pairs; copy [Hv, Dk, Dv] gets the state behind so many tokens, a cut or n
        Returns float32 [n, Hv, Dv]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.gated_delta import reference, triton

MAKERS = (reference, triton)
CHUNK = 64


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, v.device.type).step(q, k, v, g, beta, state)
    return out


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cuts: Sequence[int] = (),
    saves: Sequence[tuple[int, Tensor]] = (),
) -> Tensor:
    inner = [(offset, copy) for offset, copy in saves if offset < v.shape[0]]
    out: Tensor = choose(MAKERS, v.device.type).chunked((q, k, v, g, beta), state, cuts, CHUNK, inner)
    for offset, copy in saves:
        if offset == v.shape[0]:
            copy.copy_(state)
    return out
