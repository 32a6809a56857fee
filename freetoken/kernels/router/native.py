"""The router of a few rows in one call of the native library; many rows, and biased ones, go to torch."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._native import DTYPES
from freetoken.kernels._native import RANK as RANK
from freetoken.kernels._native import supports as supports
from freetoken.kernels.router import reference
from freetoken.kernels.router.reference import choose_experts as choose_experts
from freetoken.native.library import library
from freetoken.native.ops import Route

MOST_ROWS = 32


def route(
    h: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    top_k: int,
    normalise: bool,
    live: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lib = library()
    rows, (experts, hidden) = len(h), weight.shape
    if lib is None or not 0 < rows <= MOST_ROWS or bias is not None:
        return reference.route(h, norm, eps, weight, top_k, normalise, live, bias)
    h, live = h.contiguous(), live.contiguous()
    x, ids = torch.empty_like(h), torch.empty((rows, top_k), dtype=torch.int32)
    weights = torch.empty((rows, top_k))
    lib.run(
        Route(
            h.data_ptr(), norm.data_ptr(), weight.data_ptr(), live.data_ptr(), x.data_ptr(), ids.data_ptr(),
            weights.data_ptr(), rows, hidden, experts, DTYPES[h.dtype], top_k, int(normalise), eps,
        )
    )  # fmt: skip
    return x, ids, weights
