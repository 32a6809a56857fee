"""Norm, rotation and page writes, each by its own contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.rms_norm import rms_norm
from freetoken.kernels.rope import rotate

RANK = 0
E4M3_MAX = 448.0
"""A larger number would become NaN."""


def supports(device_type: str) -> bool:
    return True


def rope_store(
    qkv: Tensor,
    heads: Any,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    pages: Tensor,
    place: Any,
) -> Tensor:
    kv_size = heads.num_kv * heads.dim
    query, key, value = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], -1)
    query = query.unflatten(-1, (heads.num, -1))[..., : heads.dim]
    key, value = (part.unflatten(-1, (heads.num_kv, heads.dim)) for part in (key, value))
    if norms is not None:
        q_norm, k_norm, eps = norms
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    cos, sin = (table[place.positions] for table in angles)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    page_size = pages.shape[2]
    page_of = place.page_table[place.seq_of, place.positions // page_size]
    page_of = torch.where(place.live, page_of, 0)
    both = torch.stack([key, value], 1)
    if pages.element_size() == 1:
        pages = pages.view(torch.uint8)
        both = both.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[page_of, :, place.positions % page_size] = both
    return query
