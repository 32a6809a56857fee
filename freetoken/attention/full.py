"""Full attention: keys and values in pages, a page holds all layers of the kind.

Unit layout: [L, 2, page_size, Nkv, D] of `Numerics.kv` (L layers of the kind; keys, then values).
Knows pages only by the ids in the batch. Invariant: a row writes its own page slot before any read,
dead rows write to the dummy page only and read nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.interfaces import Numerics, Pool, StateSpec
from freetoken.core.model_config import AttentionSpec
from freetoken.core.units import ceil_div
from freetoken.kernels.attention import attend, attend_decode, attend_exact
from freetoken.kernels.rope_store import Heads, Place, rope_store

KIND = "full"
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def state_spec(spec: AttentionSpec, num_layers: int, page_size: int, dtype: torch.dtype) -> StateSpec:
    unit_bytes = num_layers * 2 * page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return StateSpec(kind=KIND, unit="page", unit_bytes=unit_bytes, page_sizes=PAGE_SIZES)


@dataclass(frozen=True)
class Softmax:
    """What one layer's attention does with a joined projection.

    norms    (float32 [D] for queries, for keys, eps), or None
    angles   (cos, sin) of every position, float32 [max_position, r] each
    window   how many last tokens are seen, None = all
    sinks    float32 [N] or None
    """

    heads: Heads
    norms: tuple[Tensor, Tensor, float] | None
    angles: tuple[Tensor, Tensor]
    window: int | None = None
    sinks: Tensor | None = None


class FullAttention:
    """All full-attention layers of a model over one page pool. `layer` below counts layers of the kind."""

    def __init__(self, spec: AttentionSpec, num_layers: int, numerics: Numerics, pool: Pool) -> None:
        self.spec = spec
        self.num_layers = num_layers
        self.numerics = numerics
        self.pool = pool
        self.scale = spec.head_dim**-0.5
        token_bytes = num_layers * 2 * spec.num_kv_heads * spec.head_dim * numerics.kv.itemsize
        self.page_size = pool.unit_bytes // token_bytes
        self._generation = -1
        self._pages = torch.empty(0)

    def pages(self) -> Tensor:
        """[num_pages, L, 2, page_size, Nkv, D], the mapped part only."""
        if self._generation != self.pool.generation:
            shape = (self.num_layers, 2, self.page_size, self.spec.num_kv_heads, self.spec.head_dim)
            self._pages = self.pool.view().view(self.numerics.kv).unflatten(1, shape)
            self._generation = self.pool.generation
        return self._pages

    def mix(self, layer: int, qkv: Tensor, kind: Softmax, batch: Batch) -> Tensor:
        """Write the keys and values of a joined projection and attend: [T, N, D]; dead rows give zeros."""
        pages = self.pages()[:, layer]
        place = Place(batch.positions, batch.seq_of, batch.live, batch.page_table)
        q = rope_store(qkv, kind.heads, kind.norms, kind.angles, pages, place)
        if batch.is_decode and not self.numerics.exact:
            table, context = batch.page_table, batch.context
            return attend_decode(q, pages, table, context, self.scale, kind.window, kind.sinks)
        out = torch.zeros_like(q)
        run = attend_exact if self.numerics.exact else attend
        for i in range(len(batch.segments)):
            start, stop, length = batch.query_start[i], batch.query_start[i + 1], batch.context_len[i]
            table = batch.page_table[i, : ceil_div(length, self.page_size)]
            out[start:stop] = run(q[start:stop], pages, table, length, self.scale, kind.window, kind.sinks)
        return out
