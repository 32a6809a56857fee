"""Causal softmax attention over keys and values in pages.

    attend(q, pages, table, length, scale, window, sinks)   new tokens of one sequence
    attend_exact(the same)                                  float32, a row depends on its own past alone
        q        [n, N, D]                     the sequence's last n tokens
        pages    [P, 2, page_size, Nkv, D]     one layer's view: keys, values
        table    int64 [p]                     its pages in order; p * page_size >= length
        length   int                           tokens in the pages, the n new ones included
        window   int or None                   how many last keys a token sees, itself included
        sinks    float32 [N] or None           a logit per head in the softmax, without a value
        Returns  [n, N, D] in q's dtype
    attend_decode(q, pages, page_table, context, scale, window, sinks)    one token of B sequences
        q        [B, N, D]
        page_table int64 [B, W], context int32 [B] (tokens of each, the new one included; on q's device)
        Returns  [B, N, D]; a sequence of context 0 gives zeros

Pages of one byte an element are float8_e4m3fn; only the reference reads them.
Query head h reads key head h // (N / Nkv). Bytes of the pages beyond `length` may be anything.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.attention import native, reference, triton

MAKERS = (reference, native, triton)


def _maker(q: Tensor, pages: Tensor) -> ModuleType:
    return reference if pages.element_size() == 1 else choose(MAKERS, q.device.type)


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    maker = _maker(q, pages)
    out: Tensor = maker.attend(q, pages, table, length, scale, window, sinks)
    return out


def attend_exact(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    maker = _maker(q, pages)
    out: Tensor = maker.attend_exact(q, pages, table, length, scale, window, sinks)
    return out


def attend_decode(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    context: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    maker = _maker(q, pages)
    out: Tensor = maker.attend_decode(q, pages, page_table, context, scale, window, sinks)
    return out
