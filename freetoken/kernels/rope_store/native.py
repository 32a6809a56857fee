"""Norm, rotation and page writes row by row in the native library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freetoken.kernels._native import DTYPES, address
from freetoken.kernels._native import RANK as RANK
from freetoken.kernels._native import supports as supports
from freetoken.kernels.rope_store import reference
from freetoken.native.library import library
from freetoken.native.ops import Rope


def rope_store(
    qkv: Tensor,
    heads: Any,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    pages: Tensor,
    place: Any,
) -> Tensor:
    lib = library()
    rows, (cos, sin) = len(qkv), angles
    if (
        lib is None
        or not rows
        or pages.dtype != qkv.dtype
        or qkv.stride(1) != 1
        or not pages[0].is_contiguous()
    ):
        return reference.rope_store(qkv, heads, norms, angles, pages, place)
    out = torch.empty((rows, heads.num, heads.dim), dtype=qkv.dtype)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    given = (place.positions, place.seq_of, place.page_table, place.live)
    positions, seq_of, table, live = (t.contiguous() for t in given)
    lib.run(
        Rope(
            qkv.data_ptr(), out.data_ptr(), pages.data_ptr(), address(q_norm), address(k_norm),
            cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), seq_of.data_ptr(), table.data_ptr(),
            live.data_ptr(), rows, qkv.stride(0), pages.stride(0), table.shape[1], len(cos),
            DTYPES[qkv.dtype], heads.num, heads.num_kv, heads.dim, cos.shape[1], pages.shape[2],
            int(heads.gated), eps,
        )
    )  # fmt: skip
    return out
