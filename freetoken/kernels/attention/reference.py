"""Paged attention by torch: SDPA over the gathered pages, or exact by page-sized blocks.

Exact: scores and partial outputs are products of one shape (group x D) (D x page), pages lie at
absolute positions and are added first to last, so masked or absent later pages add exact zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.core.units import ceil_div

RANK = 0
_EXACT_ELEMENTS = 1 << 22


def supports(device_type: str) -> bool:
    return True


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = pages.shape[3]
    first = max(0, length - rows + 1 - window) if window else 0
    own = _read(pages, table, q.dtype)
    keys, values = (own[:, i].flatten(0, 1)[first:length].transpose(0, 1) for i in (0, 1))  # [Nkv, c, D]
    if sinks is not None:
        seen = _visible(rows, length, first, window, q.device)
        return _with_sinks(q, keys, values, seen, sinks, scale)
    if rows == 1:
        # enable_gqa would read the keys once per query head; a group as query rows reads them once.
        out = F.scaled_dot_product_attention(
            q.reshape(1, kv_heads, -1, dim), keys[None], values[None], scale=scale
        )
        return out.reshape(1, heads, dim)
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


def _read(pages: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages of a table; bytes are float8_e4m3fn, which torch does not index."""
    if pages.element_size() > 1:
        return pages.index_select(0, table)
    return pages.view(torch.uint8).index_select(0, table).view(torch.float8_e4m3fn).to(dtype)


def attend_decode(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    context: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    out = torch.zeros_like(q)
    for i, length in enumerate(context.tolist()):
        if length:
            table = page_table[i, : ceil_div(length, pages.shape[2])]
            out[i] = attend(q[i : i + 1], pages, table, length, scale, window, sinks)[0]
    return out


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Softmax over the keys and one more logit per head, in float32, some rows at a time."""
    rows, heads, dim = q.shape
    kv_heads, count, _ = keys.shape
    group = q.float().view(rows, kv_heads, heads // kv_heads, dim) * scale
    extra = sinks.float().view(1, kv_heads, -1, 1)
    k, v = keys.float().transpose(1, 2), values.float()
    out, step = [], max(1, _EXACT_ELEMENTS // (heads * count))
    for i in range(0, rows, step):
        scores = torch.einsum("rngd,ndc->rngc", group[i : i + step], k)
        scores = scores.masked_fill(~seen[i : i + step, None, None], float("-inf"))
        both = torch.cat([scores, extra.expand(len(scores), -1, -1, -1)], -1).softmax(-1)[..., :-1]
        out.append(torch.einsum("rngc,ncd->rngd", both, v))
    return torch.cat(out).reshape(rows, heads, dim).to(q.dtype)


def _visible(rows: int, length: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, length - first]: which keys each of the last `rows` tokens sees."""
    query = torch.arange(length - rows, length, device=device)[:, None]
    key = torch.arange(first, length, device=device)
    seen = key <= query
    return seen & (key > query - window) if window else seen


def attend_exact(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, dim = q.shape
    own = _read(pages, table, torch.float32)
    num_pages, _, page_size, kv_heads, _ = own.shape
    capacity = num_pages * page_size
    kv = own.float().transpose(0, 1).flatten(1, 2)  # [2, p * page, Nkv, D]
    kv = torch.where(torch.arange(capacity, device=q.device)[:, None, None] < length, kv, 0.0)
    keys, values = kv.view(2, num_pages, page_size, kv_heads, dim).transpose(2, 3)
    # Keys as [D, page], contiguous: a broadcast product copies a transposed operand only sometimes, and
    # then another BLAS kernel runs.
    keys, values = keys.transpose(-1, -2).contiguous(), values.contiguous()
    seen = F.pad(_visible(rows, length, 0, window, q.device), (0, capacity - length))
    group = q.float().reshape(rows, 1, kv_heads, heads // kv_heads, dim)
    step = max(1, _EXACT_ELEMENTS // (capacity * kv_heads * dim))
    extra = None if sinks is None else sinks.float().view(1, 1, kv_heads, -1, 1)
    parts = [
        _exact_rows(group[i : i + step] * scale, keys, values, seen[i : i + step], extra)
        for i in range(0, rows, step)
    ]
    return torch.cat(parts).view(rows, heads, dim).to(q.dtype)


def _exact_rows(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """q [r, 1, Nkv, G, D], keys [p, Nkv, D, page], values [p, Nkv, page, D] -> [r, Nkv, G, D]."""
    rows, num_pages, page_size = q.shape[0], values.shape[0], values.shape[2]
    scores = q @ keys  # [r, p, Nkv, G, page]
    scores = scores.masked_fill(~seen.view(rows, num_pages, 1, 1, page_size), float("-inf"))
    peak = scores.amax((1, 4), keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    weights = (scores - peak).contiguous().exp()
    # A running sum adds the pages first to last whatever their number; a plain sum would not.
    total = weights.sum(-1).cumsum(1)[:, -1]
    if sinks is not None:
        total = total + (sinks - peak).exp()[:, 0, ..., 0]
    out = (weights @ values).cumsum(1)[:, -1]
    return out / total.unsqueeze(-1)
