"""Sliding-window attention: a sequence keeps the keys and values of its last tokens, a ring of pages.

Unit layout: [n, L, 2, PAGE, Nkv, D] of the compute dtype; page p of a sequence (PAGE tokens from p * PAGE on)
lies in ring page p % n. W tokens touch at most n = ceil((W - 1) / PAGE) + 1 pages, so a token never
overwrites one that it still sees. Memory does not grow with the context; resumes only from a checkpoint.

One token a sequence works on the ring in place. More go through scratch pages: the ring's, then the new
ones, in absolute order; what later tokens see is copied back, and to `Segment.saves` likewise.
Invariant: bytes before the window or behind the last token may be anything; dead rows touch state 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freetoken.attention import full
from freetoken.attention.full import Softmax
from freetoken.core.batch import Batch, Segment
from freetoken.core.interfaces import Numerics, Pool, StateSpec
from freetoken.core.model_config import AttentionSpec, ModelConfig
from freetoken.core.units import ceil_div
from freetoken.kernels.attention import attend, attend_decode, attend_exact
from freetoken.kernels.rope_store import Place, rope_store

KIND = "sliding"
PAGE = 16


def ring_pages(window: int) -> int:
    """Pages of a ring that holds the last `window` tokens wherever a page begins."""
    return ceil_div(window - 1, PAGE) + 1


def window_of(config: ModelConfig) -> int:
    """The widest window of the kind's layers."""
    return max(layer.window or 1 for layer in config.layers if layer.mixer == KIND)


def state_spec(spec: AttentionSpec, num_layers: int, window: int, dtype: torch.dtype) -> StateSpec:
    token_bytes = num_layers * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    unit_bytes = ring_pages(window) * PAGE * token_bytes
    return StateSpec(kind=KIND, unit="state", unit_bytes=unit_bytes, window=window, resume="checkpoint")


def in_pages(config: ModelConfig) -> ModelConfig:
    """The same model with its windowed layers in KV pages: more memory a token, resumes anywhere."""
    layers = tuple(replace(x, mixer=full.KIND) if x.mixer == KIND else x for x in config.layers)
    return replace(config, layers=layers)


@dataclass(frozen=True)
class _Part:
    """One sequence's scratch pages: `count` from page `first` of the sequence on, at `offset`."""

    segment: Segment
    first: int
    count: int
    offset: int

    @property
    def end(self) -> int:
        """Tokens of the sequence once this batch is written."""
        return self.segment.start + len(self.segment.token_ids)


class SlidingAttention:
    """All sliding layers of a model over one state pool. `layer` below counts layers of the kind."""

    def __init__(
        self, spec: AttentionSpec, num_layers: int, window: int, numerics: Numerics, pool: Pool
    ) -> None:
        self.spec = spec
        self.num_layers = num_layers
        self.window = window
        self.numerics = numerics
        self.pool = pool
        self.scale = spec.head_dim**-0.5
        self.num_pages = ring_pages(window)
        self._generation = -1
        self._pages = torch.empty(0)

    def pages(self) -> Tensor:
        """[num_states * n, L, 2, PAGE, Nkv, D], the mapped part only."""
        if self._generation != self.pool.generation:
            shape = (-1, self.num_layers, 2, PAGE, self.spec.num_kv_heads, self.spec.head_dim)
            self._pages = self.pool.view().view(self.numerics.dtype).view(shape)
            self._generation = self.pool.generation
        return self._pages

    def mix(self, layer: int, qkv: Tensor, kind: Softmax, batch: Batch) -> Tensor:
        """Keep the keys and values of a joined projection and attend: [T, N, D]; dead rows give zeros."""
        ring = self.pages()[:, layer]
        if batch.is_decode and not self.numerics.exact:
            return self._decode(ring, qkv, kind, batch)
        return self._through_scratch(ring, qkv, kind, batch)

    def _decode(self, ring: Tensor, qkv: Tensor, kind: Softmax, batch: Batch) -> Tensor:
        """One token of every sequence, on the ring."""
        n, place = self.num_pages, qkv.device
        units = batch.state_ids[:, None] * n
        width = ceil_div(batch.page_table.shape[1] * batch.page_size, PAGE)
        everywhere = units + torch.arange(width, device=place) % n
        where = Place(batch.positions, batch.seq_of, batch.live, everywhere)
        q = rope_store(qkv, kind.heads, kind.norms, kind.angles, ring, where)
        first = (batch.context - self.window).clamp(min=0) // PAGE
        table = units + (first[:, None] + torch.arange(n, device=place)) % n
        context = batch.context - first * PAGE
        out = attend_decode(q, ring, table, context, self.scale, kind.window, kind.sinks)
        for segment in batch.segments:
            for _, copy in segment.saves_within():
                own, other = (slice(unit * n, (unit + 1) * n) for unit in (segment.state_id, copy))
                ring[other] = ring[own]
        return out

    def _through_scratch(self, ring: Tensor, qkv: Tensor, kind: Softmax, batch: Batch) -> Tensor:
        parts = self._parts(batch.segments)
        scratch = ring.new_empty((parts[-1].offset + parts[-1].count, *ring.shape[1:]))
        for part in parts:
            self._copy(scratch, ring, part, part.segment.state_id, part.segment.start, back=False)
        where = Place(batch.positions, batch.seq_of, batch.live, self._table(parts, batch))
        q = rope_store(qkv, kind.heads, kind.norms, kind.angles, scratch, where)
        out, run = torch.zeros_like(q), attend_exact if self.numerics.exact else attend
        for i, part in enumerate(parts):
            rows = slice(batch.query_start[i], batch.query_start[i + 1])
            length = part.end - part.first * PAGE
            table = torch.arange(part.offset, part.offset + part.count, device=q.device)
            out[rows] = run(q[rows], scratch, table, length, self.scale, kind.window, kind.sinks)
        for part in parts:
            copies = [(part.end, part.segment.state_id), *part.segment.saves_within()]
            for end, unit in copies:
                self._copy(scratch, ring, part, unit, end, back=True)
        return out

    def _parts(self, segments: Sequence[Segment]) -> list[_Part]:
        parts, offset = [], 1  # page 0 is the dead rows'
        for segment in segments:
            first = max(segment.start - self.window + 1, 0) // PAGE
            count = ceil_div(segment.start + len(segment.token_ids), PAGE) - first
            parts.append(_Part(segment, first, count, offset))
            offset += count
        return parts

    def _table(self, parts: Sequence[_Part], batch: Batch) -> Tensor:
        """int64 [B, pages]: where each page of a sequence lies in the scratch."""
        width = max(part.first + part.count for part in parts)
        table = torch.zeros(batch.page_table.shape[0], width, dtype=torch.int64)
        for i, part in enumerate(parts):
            table[i, part.first : part.first + part.count] = torch.arange(part.count) + part.offset
        return table.to(batch.page_table.device)

    def _copy(self, scratch: Tensor, ring: Tensor, part: _Part, unit: int, end: int, *, back: bool) -> None:
        """Pages with what the token behind the first `end` ones sees: from a unit's ring, or back to one."""
        first = max(end - self.window + 1, 0) // PAGE
        numbers = torch.arange(first, ceil_div(end, PAGE), device=ring.device)
        here = slice(part.offset + first - part.first, part.offset + first - part.first + len(numbers))
        there = unit * self.num_pages + numbers % self.num_pages
        if back:
            ring[there] = scratch[here]
        else:
            scratch[here] = ring[there]
