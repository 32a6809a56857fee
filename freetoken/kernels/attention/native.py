"""Attention of one token a sequence by the native library; longer runs go to torch.

Keys are read once for all query heads of their group. Runs of 256 keys are computed apart and joined in
ascending order, so a row's bits depend on its own length alone, not on threads or neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._native import DTYPES, address
from freetoken.kernels._native import RANK as RANK
from freetoken.kernels._native import supports as supports
from freetoken.kernels.attention import reference
from freetoken.native.library import library
from freetoken.native.ops import Attend


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    return reference.attend(q, pages, table, length, scale, window, sinks)


def attend_exact(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    return reference.attend_exact(q, pages, table, length, scale, window, sinks)


def attend_decode(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    context: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    lib = library()
    seqs, heads, dim = q.shape
    if lib is None or not seqs or pages.dtype != q.dtype or not pages[0].is_contiguous():
        return reference.attend_decode(q, pages, page_table, context, scale, window, sinks)
    q, table, context = q.contiguous(), page_table.contiguous(), context.contiguous()
    extra = None if sinks is None else sinks.float().contiguous()
    out = torch.empty_like(q)
    lib.run(
        Attend(
            q.data_ptr(), pages.data_ptr(), out.data_ptr(), table.data_ptr(), context.data_ptr(),
            address(extra), seqs, pages.stride(0), table.shape[1], DTYPES[q.dtype], heads,
            pages.shape[3], dim, pages.shape[2], window or 0, scale,
        )
    )  # fmt: skip
    return out
