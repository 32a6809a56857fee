"""The Batch carries its world: what one forward needs, as views of fixed-address buffers.

A decode bucket is captured once, so a forward never allocates what outlives it, never branches on
values and masks dead rows. Knows no request and no model. `BatchBuffers.fill` copies in.

Shapes: T token rows, B sequences, P pages of the longest sequence. The rows of one sequence are
neighbours: rows query_start[b] .. query_start[b+1].
"""

from __future__ import annotations

from collections.abc import Sequence
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


class BatchBuffers:
    """Fixed-address int buffers for batches of up to `max_rows` rows and `max_seqs` sequences.

    One set per phase (decode, prefill). `last_tokens` int64 [max_seqs] is the sampler's output
    buffer: a Segment with token id -1 reads it on the device, so the host need not know the token.
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
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.page_size = page_size
        self.max_rows, self.max_seqs = max_rows, max_seqs
        self.last_tokens = last_tokens
        self.ids, self.positions, self.seq_of = zeros(max_rows), zeros(max_rows), zeros(max_rows)
        self.live = zeros(max_rows, dtype=torch.bool)
        self.page_table = zeros(max_seqs, max_pages)
        self.state_ids = zeros(max_seqs)
        self.context = zeros(max_seqs, dtype=torch.int32)
        self.fresh = zeros(max_seqs, dtype=torch.bool)
        self.logit_rows, self.sample_rows = zeros(max_seqs), zeros(max_seqs)

    def fill(self, segments: Sequence[Segment], bucket_rows: int = 0) -> Batch:
        """Copy `segments` in and return views; decode batches are padded to `bucket_rows` rows."""
        lengths = [len(s.token_ids) for s in segments]
        total, seqs = sum(lengths), len(segments)
        is_decode = all(n == 1 for n in lengths)
        rows = max(total, bucket_rows) if is_decode else total
        pad = rows - total
        starts = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([s.token_ids for s in segments]).astype(np.int64)
        seq_of = np.repeat(np.arange(seqs), lengths)
        positions = np.concatenate(
            [np.arange(s.start, s.start + n) for s, n in zip(segments, lengths, strict=True)]
        )
        self._put(self.ids, ids, rows)
        self._put(self.positions, positions, rows)
        self._put(self.seq_of, np.concatenate([seq_of, np.arange(seqs, seqs + pad)]), rows)
        self.live[:total] = True
        self.live[total:rows] = False
        width = max(1, max(len(s.page_ids) for s in segments))
        table = np.full((seqs + pad, width), DUMMY_PAGE, np.int64)
        for b, s in enumerate(segments):
            table[b, : len(s.page_ids)] = s.page_ids
        self.page_table[: seqs + pad, :width].copy_(torch.from_numpy(table))
        self._put(self.state_ids, np.array([s.state_id for s in segments] + [DUMMY_STATE] * pad), seqs + pad)
        self._put(self.fresh, np.array([s.start == 0 for s in segments] + [True] * pad), seqs + pad)
        wanted = [b for b, s in enumerate(segments) if s.wants_logits]
        self._put(self.logit_rows, starts[1:][wanted] - 1, len(wanted))
        self._put(self.sample_rows, np.array([segments[b].row for b in wanted], np.int64), len(wanted))
        self._take_sampled(segments, starts)
        context = [s.start + n for s, n in zip(segments, lengths, strict=True)] + [0] * pad
        self._put(self.context, np.array(context, np.int32), seqs + pad)
        return Batch(
            ids=self.ids[:rows],
            positions=self.positions[:rows],
            live=self.live[:rows],
            seq_of=self.seq_of[:rows],
            query_start=tuple(int(n) for n in starts) + tuple(range(total + 1, rows + 1)),
            context_len=tuple(context),
            context=self.context[: seqs + pad],
            page_table=self.page_table[: seqs + pad, :width],
            state_ids=self.state_ids[: seqs + pad],
            fresh=self.fresh[: seqs + pad],
            logit_rows=self.logit_rows[: len(wanted)],
            sample_rows=self.sample_rows[: len(wanted)],
            segments=tuple(segments),
            is_decode=is_decode,
            page_size=self.page_size,
        )

    def _put(self, buffer: Tensor, values: np.ndarray, n: int) -> None:
        buffer[: len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)))
        buffer[len(values) : n].zero_()

    def _take_sampled(self, segments: Sequence[Segment], starts: np.ndarray) -> None:
        """Replace ids of -1 by what the sampler wrote for the sequence, without asking the host."""
        rows = [(int(starts[b]), s.row) for b, s in enumerate(segments) if s.token_ids[0] < 0]
        if rows:
            at, source = (torch.tensor(x, device=self.ids.device) for x in zip(*rows, strict=True))
            self.ids[at] = self.last_tokens[source]
