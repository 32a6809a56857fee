"""Paged attention by torch: SDPA over the gathered pages, or exact by page-sized blocks.

Exact: scores and partial outputs are products of one shape (group x D) (D x page), pages lie at
absolute positions and are added first to last, so masked or absent later pages add exact zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RANK = 0
_EXACT_ELEMENTS = 1 << 22


def supports(device_type: str) -> bool:
    return True


def attend(q: Tensor, pages: Tensor, length: int, scale: float, window: int | None) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = pages.shape[3]
    first = max(0, length - rows + 1 - window) if window else 0
    keys, values = (pages[:, i].flatten(0, 1)[first:length].transpose(0, 1) for i in (0, 1))  # [Nkv, c, D]
    if rows == 1:
        # enable_gqa would read the keys once per query head; a group as query rows reads them once.
        out = F.scaled_dot_product_attention(
            q.view(1, kv_heads, -1, dim), keys[None], values[None], scale=scale
        )
        return out.view(1, heads, dim)
    whole = rows == length - first and not window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if whole else _visible(rows, length, first, window, q.device),
        is_causal=whole,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out[0].transpose(0, 1)


def _visible(rows: int, length: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, length - first]: which keys each of the last `rows` tokens sees."""
    query = torch.arange(length - rows, length, device=device)[:, None]
    key = torch.arange(first, length, device=device)
    seen = key <= query
    return seen & (key > query - window) if window else seen


def attend_exact(q: Tensor, pages: Tensor, length: int, scale: float, window: int | None) -> Tensor:
    rows, heads, dim = q.shape
    num_pages, _, page_size, kv_heads, _ = pages.shape
    capacity = num_pages * page_size
    kv = pages.float().transpose(0, 1).flatten(1, 2)  # [2, p * page, Nkv, D]
    kv = torch.where(torch.arange(capacity, device=q.device)[:, None, None] < length, kv, 0.0)
    keys, values = kv.view(2, num_pages, page_size, kv_heads, dim).transpose(2, 3)
    # Keys as [D, page], contiguous: a broadcast product copies a transposed operand only sometimes, and
    # then another BLAS kernel runs.
    keys, values = keys.transpose(-1, -2).contiguous(), values.contiguous()
    seen = F.pad(_visible(rows, length, 0, window, q.device), (0, capacity - length))
    group = q.float().reshape(rows, 1, kv_heads, heads // kv_heads, dim)
    step = max(1, _EXACT_ELEMENTS // (capacity * kv_heads * dim))
    parts = [
        _exact_rows(group[i : i + step] * scale, keys, values, seen[i : i + step])
        for i in range(0, rows, step)
    ]
    return torch.cat(parts).view(rows, heads, dim).to(q.dtype)


def _exact_rows(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """q [r, 1, Nkv, G, D], keys [p, Nkv, D, page], values [p, Nkv, page, D] -> [r, Nkv, G, D]."""
    rows, num_pages, page_size = q.shape[0], values.shape[0], values.shape[2]
    scores = q @ keys  # [r, p, Nkv, G, page]
    scores = scores.masked_fill(~seen.view(rows, num_pages, 1, 1, page_size), float("-inf"))
    peak = scores.amax((1, 4), keepdim=True)
    weights = (scores - peak).contiguous().exp()
    # A running sum adds the pages first to last whatever their number; a plain sum would not.
    total = weights.sum(-1).cumsum(1)[:, -1]
    out = (weights @ values).cumsum(1)[:, -1]
    return out / total.unsqueeze(-1)
