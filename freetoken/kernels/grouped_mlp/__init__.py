"""Routed experts of many rows, their uncoded records by address: a prompt's MoE layer, or a part of it.

    sort_routes(ids, num_experts)                 once per layer and sub-chunk
        ids      int32 [T, k]   ascending within a row, -1 = dead or none
        Returns  Routes         who goes where; nothing of it is known to the host
    grouped_mlp(x, routes, weights, records, form, span, out)
        x        16-bit [T, H]      weights float32 [T, k]
        records  int64 [E]          address of each expert's record: a slot, a ring buffer, a mapped host row;
                                    only those of `span` are read
        form     Form               where things lie in a record; weights of x's type
        span     (first, last)      the experts to add
        out      float32 [T, H]     (mutated) grows by weight * expert(x), one expert after the other

Rounding points: gate and up float32, `act(g) * u` rounded once to x's type, down and its bias float32, the
route's weight in float32. `out` is the same bits whatever spans 0 .. E is cut into, as long as they ascend.
Never syncs.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.grouped_mlp import reference, triton
from freetoken.kernels.grouped_mlp._types import Form, Routes

__all__ = ["Form", "Routes"]

MAKERS = (reference, triton)


def sort_routes(ids: Tensor, num_experts: int) -> Routes:
    routes: Routes = choose(MAKERS, ids.device.type).sort_routes(ids, num_experts)
    return routes


def grouped_mlp(
    x: Tensor,
    routes: Routes,
    weights: Tensor,
    records: Tensor,
    form: Form,
    span: tuple[int, int],
    out: Tensor,
) -> None:
    choose(MAKERS, x.device.type).grouped_mlp(x, routes, weights, records, form, span, out)
