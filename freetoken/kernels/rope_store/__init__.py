"""From a joined projection to rotated queries, keys and values in their pages.

    rope_store(qkv, heads, norms, angles, pages, place)
        qkv     [T, (N or 2 N) D + 2 Nkv D]   queries (each head followed by its gate if gated), keys, values
        heads   Heads
        norms   (float32 [D] for queries, float32 [D] for keys, eps), or None: not normed
        angles  (cos, sin) float32 [max_position, r] each
        pages   [P, 2, page_size, Nkv, D]     one layer's view: keys, then values      (mutated)
        place   Place: where each row belongs; dead rows write to page 0
        Returns [T, N, D] in qkv's dtype

Row t writes slot positions[t] % page_size of page page_table[seq_of[t], positions[t] // page_size].
Rounding points: after the norm and after the rotation, each once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.rope_store import native, reference, triton

MAKERS = (reference, native, triton)


@dataclass(frozen=True)
class Heads:
    """N query heads and Nkv key heads of D dimensions; `gated`: a gate of D follows every query head."""

    num: int
    num_kv: int
    dim: int
    gated: bool = False


@dataclass(frozen=True)
class Place:
    """positions, seq_of int64 [T]; live bool [T]; page_table int64 [B, W]."""

    positions: Tensor
    seq_of: Tensor
    live: Tensor
    page_table: Tensor


def rope_store(
    qkv: Tensor,
    heads: Heads,
    norms: tuple[Tensor, Tensor, float] | None,
    angles: tuple[Tensor, Tensor],
    pages: Tensor,
    place: Place,
) -> Tensor:
    maker = reference if pages.element_size() == 1 else choose(MAKERS, qkv.device.type)
    out: Tensor = maker.rope_store(qkv, heads, norms, angles, pages, place)
    return out
