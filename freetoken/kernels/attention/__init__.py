"""Causal softmax attention of one sequence's new tokens over keys and values in pages.

    attend(q, pages, length, scale, window)         normal
    attend_exact(q, pages, length, scale, window)   float32, a row's result depends on its own past alone
        q        [n, N, D]                   the sequence's last n tokens
        pages    [p, 2, page_size, Nkv, D]   its pages in order: keys, values; p * page_size >= length
        length   int                         tokens in the pages, the n new ones included
        window   int or None                 how many last keys a token sees, itself included
        Returns  [n, N, D] in q's dtype

Query head h reads key head h // (N / Nkv). Bytes of the pages beyond `length` may be anything.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.attention import reference

MAKERS = (reference,)


def attend(q: Tensor, pages: Tensor, length: int, scale: float, window: int | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, q.device.type).attend(q, pages, length, scale, window)
    return out


def attend_exact(q: Tensor, pages: Tensor, length: int, scale: float, window: int | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, q.device.type).attend_exact(q, pages, length, scale, window)
    return out
