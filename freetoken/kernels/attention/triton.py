"""Paged attention on a CUDA device: one token of many sequences, or many tokens of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, card
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.attention import _decode, _prefill, reference

RANK = 20


def attend_decode(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    context: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = card(q.device)
    for launch in _decode.plan(
        q, pages, page_table, context, out, where, scale=scale, window=window, sinks=sinks
    ):
        launch()
    return out


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = card(q.device)
    # A few tokens behind a long context: split it, or few blocks would walk it alone.
    if q.shape[0] <= _decode.most_tokens(q.shape[1], pages.shape[3], q.shape[2]):
        launches = _decode.plan(
            q, pages, table[None], length, out, where, scale=scale, window=window, sinks=sinks
        )
    else:
        launches = _prefill.plan(q, pages, table, length, out, where, scale=scale, window=window, sinks=sinks)
    for launch in launches:
        launch()
    return out


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


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """Heads, key heads, D, page, window, sinks of models that people run."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def decode(batch: int, geometry: tuple[int, ...], window: int | None, sinks: bool):
        heads, kv, dim, page = geometry
        q, pages = empty(batch, heads, dim), empty(64, 24, 2, page, kv, dim)[:, 3]
        table, context = empty(batch, 1024, dtype=torch.int64), empty(batch, dtype=torch.int32)
        sink = empty(heads, dtype=torch.float32) if sinks else None
        return lambda where: _decode.plan(
            q, pages, table, context, q, where, scale=0.1, window=window, sinks=sink
        )

    def prefill(n: int, geometry: tuple[int, ...], window: int | None, sinks: bool):
        heads, kv, dim, page = geometry
        q, pages = empty(n, heads, dim), empty(64, 24, 2, page, kv, dim)[:, 3]
        table, sink = empty(1024, dtype=torch.int64), empty(heads, dtype=torch.float32) if sinks else None
        return lambda where: _prefill.plan(
            q, pages, table, 8192, q, where, scale=0.1, window=window, sinks=sink
        )

    def suffix(n: int, geometry: tuple[int, ...], window: int | None, sinks: bool):
        heads, kv, dim, page = geometry
        q, pages = empty(n, heads, dim), empty(64, 24, 2, page, kv, dim)[:, 3]
        table, sink = empty(1, 1024, dtype=torch.int64), empty(heads, dtype=torch.float32) if sinks else None
        return lambda where: _decode.plan(
            q, pages, table, 8192, q, where, scale=0.1, window=window, sinks=sink
        )

    for geometry in ((32, 4, 128, 16), (16, 2, 256, 64), (64, 8, 64, 16)):
        plain = geometry[2] != 64
        yield decode(1, geometry, None if plain else 128, not plain)
        yield decode(8, geometry, None, False)
        for n in (8192, 40, 9):
            yield prefill(n, geometry, None if plain else 128, not plain)
        yield suffix(_decode.most_tokens(*geometry[:3]), geometry, None if plain else 128, not plain)
    yield prefill(8192, (32, 4, 128, 128), None, False)
