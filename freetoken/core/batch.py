"""The Batch carries its world: what one forward needs, as views of fixed-address buffers.

A decode bucket is captured once, so a forward never allocates what outlives it, never branches on
values and masks dead rows. Knows no request and no model. `BatchBuffers.fill` copies in.

Shapes: T token rows, B sequences, P pages of the longest sequence. The rows of one sequence are
neighbours: rows query_start[b] .. query_start[b+1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DUMMY_PAGE = 0
DUMMY_STATE = 0


@dataclass(frozen=True)
class Segment:
    """One sequence's part of a batch, on the host.

    token_ids    int32 [n]   tokens to compute; -1 = take the token the device sampled last for `row`
    start        int         absolute position of the first of them (= tokens already computed)
    page_ids     int32 [p]   the sequence's pages, enough for start + n
    state_id     int         recurrent state slot (DUMMY_STATE if the model has none)
    row          int         row of the sampler's token buffer
    wants_logits bool        False for a chunk that isn't the last of its prompt
    anchors      ints        absolute positions where a recurrent scan must split
    saves        pairs       (position, state slot): write the state behind `position` tokens there too
    request      int         number of the request, for traces
    is_decode    bool        a generated token, not a part of a prompt
    """

    token_ids: np.ndarray
    start: int
    page_ids: Sequence[int]
    state_id: int
    row: int
    wants_logits: bool = True
    anchors: tuple[int, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    request: int = -1
    is_decode: bool = False

    def saves_within(self) -> list[tuple[int, int]]:
        """The `saves` that these tokens reach; the sub-chunks of a prefill job carry them all."""
        end = self.start + len(self.token_ids)
        return [(position, copy) for position, copy in self.saves if self.start < position <= end]


@dataclass(frozen=True)
class Batch:
    """One forward's inputs.

    ids            int64 [T]      token ids (dead rows: 0)
    positions      int64 [T]      absolute positions
    live           bool  [T]      False for padding rows: they route nowhere and write to dummies
    seq_of         int64 [T]      sequence of each row
    query_start    int32 [B+1]    host numpy too: `query_start_host`
    context_len    int32 [B]      tokens in the KV cache once this batch is written, on the host
    context        int32 [B]      the same on the device
    page_table     int64 [B, P]   page ids, DUMMY_PAGE beyond the end
    state_ids      int64 [B]      recurrent state slots
    fresh          bool  [B]      the sequence starts here: its state begins at zero
    logit_rows     int64 [R]      rows whose logits are wanted, and `sample_rows` int64 [R] of the sampler
    segments       host view of the same facts
    is_decode      every live sequence has exactly one row
    page_size      tokens a page
    """

    ids: Tensor
    positions: Tensor
    live: Tensor
    seq_of: Tensor
    query_start: tuple[int, ...]
    context_len: tuple[int, ...]
    context: Tensor
    page_table: Tensor
    state_ids: Tensor
    fresh: Tensor
    logit_rows: Tensor
    sample_rows: Tensor
    segments: tuple[Segment, ...]
    is_decode: bool
    page_size: int

    @property
    def num_rows(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_live(self) -> int:
        return self.query_start[len(self.segments)]


_FIELDS = {
    "ids": (np.int64, True),
    "positions": (np.int64, True),
    "seq_of": (np.int64, True),
    "sources": (np.int64, True),
    "state_ids": (np.int64, False),
    "logit_rows": (np.int64, False),
    "sample_rows": (np.int64, False),
    "context": (np.int32, False),
    "live": (np.bool_, True),
    "fresh": (np.bool_, False),
}
"""Type of each small buffer, and whether it has one entry a row (else one a sequence)."""


def _arrays(views: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The same memory, which has to be the host's."""
    return {name: view.numpy() for name, view in views.items()}


class BatchBuffers:
    """Fixed-address int buffers for batches of up to `max_rows` rows and `max_seqs` sequences.

    One set per phase (decode, prefill). `last_tokens` int64 [max_seqs] is the sampler's output
    buffer: a Segment with token id -1 reads it on the device, so the host need not know the token.
    All small buffers are one allocation: a device of its own memory gets them in one copy, which never
    waits for the device. Rows of the page table go over when they change.
    """

    def __init__(
        self,
        max_rows: int,
        max_seqs: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        last_tokens: Tensor,
    ) -> None:
        self.page_size = page_size
        self.max_rows, self.max_seqs = max_rows, max_seqs
        self.last_tokens = last_tokens
        self._pinned = device.type == "cuda"
        self._ranges, at = {}, 0
        for name, (kind, per_row) in _FIELDS.items():
            size = (max_rows if per_row else max_seqs) * np.dtype(kind).itemsize
            self._ranges[name] = (at, at + size)
            at += -(-size // 64) * 64
        self._bytes = torch.zeros(at, dtype=torch.uint8, device=device)
        self._views = {name: self._view(self._bytes, name) for name in _FIELDS}
        self._arrays = {} if self._pinned else _arrays(self._views)
        self._last = None if self._pinned else last_tokens.numpy()
        self.page_table = torch.zeros(max_seqs, max_pages, dtype=torch.int64, device=device)
        self._pages: list[tuple[int, ...]] = [()] * max_seqs

    def __getattr__(self, name: str) -> Tensor:
        try:
            found: Tensor = self.__dict__["_views"][name]
        except KeyError:
            raise AttributeError(name) from None
        return found

    def fill(self, segments: Sequence[Segment], bucket_rows: int = 0, *, resolve: bool = True) -> Batch:
        """Copy `segments` in and return views; decode batches are padded to `bucket_rows` rows.

        resolve False: `self.resolve` is called where the forward is captured.
        """
        lengths = [len(s.token_ids) for s in segments]
        total, seqs = sum(lengths), len(segments)
        is_decode = all(n == 1 for n in lengths)
        rows = max(total, bucket_rows) if is_decode else total
        pad = rows - total
        put = self._arrays
        if self._pinned:
            host = torch.zeros_like(self._bytes, device="cpu", pin_memory=True)
            put = _arrays({name: self._view(host, name) for name in _FIELDS})
        starts = np.zeros(seqs + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        wanted = [b for b, s in enumerate(segments) if s.wants_logits]
        self._write(put, segments, starts, wanted)
        put["seq_of"][total:rows] = np.arange(seqs, seqs + pad)
        for name in ("ids", "positions", "live"):
            put[name][total:rows] = 0
        put["sources"][total:rows] = -1
        put["state_ids"][seqs : seqs + pad], put["context"][seqs : seqs + pad] = DUMMY_STATE, 0
        put["fresh"][seqs : seqs + pad] = True
        if self._pinned:
            self._bytes.copy_(host, non_blocking=True)
        self._put_pages(segments)
        batch = self.batch(rows, seqs + pad, len(wanted), segments, is_decode)
        if resolve and (put["sources"][:total] >= 0).any():
            self.resolve(rows)
        return batch

    def resolve(self, rows: int) -> None:
        """Take what the sampler wrote for the rows that name a source, without asking the host."""
        if self._last is not None:
            found = self._arrays["sources"][:rows]
            own = self._arrays["ids"][:rows]
            own[found >= 0] = self._last[found[found >= 0]]
            return
        ids, sources = self.ids[:rows], self.sources[:rows]
        ids.copy_(torch.where(sources >= 0, self.last_tokens[sources.clamp(min=0)], ids))

    def batch(self, rows: int, seqs: int, wanted: int, segments: Sequence[Segment], is_decode: bool) -> Batch:
        """Views of the first rows and sequences; what `segments` don't name is padding."""
        lengths = [len(s.token_ids) for s in segments]
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        context = [s.start + n for s, n in zip(segments, lengths, strict=True)]
        return Batch(
            ids=self.ids[:rows],
            positions=self.positions[:rows],
            live=self.live[:rows],
            seq_of=self.seq_of[:rows],
            query_start=tuple(starts) + tuple(range(starts[-1] + 1, rows + 1)),
            context_len=tuple(context + [0] * (seqs - len(context))),
            context=self.context[:seqs],
            page_table=self.page_table[:seqs],
            state_ids=self.state_ids[:seqs],
            fresh=self.fresh[:seqs],
            logit_rows=self.logit_rows[:wanted],
            sample_rows=self.sample_rows[:wanted],
            segments=tuple(segments),
            is_decode=is_decode,
            page_size=self.page_size,
        )

    def _write(
        self, put: dict[str, np.ndarray], segments: Sequence[Segment], starts: np.ndarray, wanted: list[int]
    ) -> None:
        for b, s in enumerate(segments):
            a, e = int(starts[b]), int(starts[b + 1])
            put["ids"][a:e] = s.token_ids
            put["positions"][a:e] = np.arange(s.start, s.start + e - a)
            put["seq_of"][a:e], put["live"][a:e], put["sources"][a:e] = b, True, -1
            if e > a and s.token_ids[0] < 0:
                put["ids"][a], put["sources"][a] = 0, s.row
            put["state_ids"][b], put["fresh"][b] = s.state_id, s.start == 0
            put["context"][b] = s.start + e - a
        put["logit_rows"][: len(wanted)] = starts[1:][wanted] - 1
        put["sample_rows"][: len(wanted)] = [segments[b].row for b in wanted]

    def _put_pages(self, segments: Sequence[Segment]) -> None:
        for b, s in enumerate(segments):
            pages = tuple(s.page_ids)
            if pages == self._pages[b] or not pages:
                continue
            row = torch.tensor(pages, dtype=torch.int64)
            row = row.pin_memory() if self._pinned else row
            self.page_table[b, : len(pages)].copy_(row, non_blocking=True)
            self._pages[b] = pages

    def _view(self, raw: Tensor, name: str) -> Tensor:
        a, b = self._ranges[name]
        kind = torch.from_numpy(np.empty(0, _FIELDS[name][0])).dtype
        return raw[a:b].view(kind)
