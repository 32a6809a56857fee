"""The router by torch: a stable sort makes ties go to the lowest id."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.linear import linear
from freetoken.kernels.rms_norm import rms_norm

RANK = 0


def supports(device_type: str) -> bool:
    return True


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
    x = rms_norm(h, norm, eps)
    return x, *choose_experts(linear(x.float(), weight, bias), top_k, normalise, live)


def choose_experts(logits: Tensor, top_k: int, normalise: bool, live: Tensor) -> tuple[Tensor, Tensor]:
    probs, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = probs[:, :top_k]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    ids, at = order[:, :top_k].sort(dim=-1)
    ids = torch.where(live[:, None], ids, -1).to(torch.int32)
    weights = torch.where(live[:, None], weights.gather(1, at), 0.0)
    return ids, weights
