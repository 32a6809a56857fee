"""Grouped experts on a CUDA device: routes sorted there, two grouped products, an ordered sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.core.model_config import Activation
from freetoken.kernels._triton import Card, Launch, card
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.grouped_mlp import _products, _sort
from freetoken.kernels.grouped_mlp._types import Form, Routes

RANK = 20


def sort_routes(ids: Tensor, num_experts: int) -> Routes:
    block = _products.block_rows(*ids.shape, num_experts)
    routes, launches = _sort.plan(ids.contiguous(), num_experts, block)
    for launch in launches:
        launch()
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
    if not x.shape[0] or span[1] <= span[0]:
        return
    weights = weights.contiguous()
    for launch in _products.plan(x, routes, weights, records, form, span, out, card(x.device)):
        launch()


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """Experts of Qwen3-30B-A3B, Qwen3.6 and gpt-oss, with many and with few rows each."""

    def one(rows: int, experts: int, top_k: int, form: Form) -> Callable[[Card], list[Launch]]:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        def build(where: Card) -> list[Launch]:
            block = _products.block_rows(rows, top_k, experts)
            routes, launches = _sort.plan(empty(rows, top_k, dtype=torch.int32), experts, block)
            x, out = empty(rows, form.hidden), empty(rows, form.hidden, dtype=torch.float32)
            weights = empty(rows, top_k, dtype=torch.float32)
            records = empty(experts, dtype=torch.int64)
            return launches + _products.plan(x, routes, weights, records, form, (0, experts), out, where)

        return build

    plain = Form(2048, 768, 32, 3 * 32 * 2048 * 2, 0)
    clamped = Activation("silu", 1.702, 7.0, 1.0)
    biased = Form(2880, 2880, 64, 3 * 64 * 2880 * 2 + 512, 11520, 3 * 64 * 2880 * 2, clamped)
    yield one(4096, 128, 8, plain)
    yield one(4096, 32, 4, biased)
    yield one(1024, 256, 8, Form(2048, 512, 32, 3 * 32 * 2048 * 2, 0))
    yield one(100, 128, 8, plain)
