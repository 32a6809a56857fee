"""A hand-driven engine for tests: pages and states handed out in order, segments run as told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freetoken.attention import sliding
from freetoken.core.batch import BatchBuffers, Segment
from freetoken.core.interfaces import Model, ModelFamily, Numerics
from freetoken.devices.cpu import CpuDevice
from freetoken.weights.load import open_checkpoint
from tests.models.reference_experts import ReferenceExperts


@dataclass
class Sequence_:
    """One running sequence: its tokens so far and what it owns."""

    page_ids: list[int]
    state_id: int
    row: int
    num_computed: int = 0
    anchors: tuple[int, ...] = ()
    logits: list[Tensor] = field(default_factory=list)


class Runner:
    """Runs a model over sequences; every computed row's logits are kept."""

    def __init__(
        self,
        family: ModelFamily,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
        page_size: int = 4,
        num_pages: int = 64,
        num_states: int = 9,
        poison: bool = True,
        in_pages: bool = False,
    ) -> None:
        checkpoint = open_checkpoint(path)
        self.config = family.read_config(checkpoint.config)
        if in_pages:
            self.config = sliding.in_pages(self.config)
        device = CpuDevice()
        self.page_size, self.max_pages = page_size, num_pages
        self.pools: dict[str, Any] = {}
        counts: Mapping[str, tuple[str, int]] = {"page": ("kv", num_pages), "state": ("state", num_states)}
        for spec in family.state_specs(self.config, page_size, dtype):
            name, count = counts[spec.unit]
            self.pools[name] = device.pool(name, spec.unit_bytes, count, min_units=1, max_units=count)
            if poison:
                self.pools[name].view().fill_(0xFF)
        moe = self.config.moe
        self.experts = ReferenceExperts(exact=exact, activation=moe.activation if moe else None)
        self.model: Model = family.build(
            self.config, checkpoint.source, device, Numerics(dtype, exact), self.pools
        )
        if self.config.moe:
            family.load_experts(self.config, checkpoint.source, self.experts)
        self.skipped = checkpoint.skipped
        checkpoint.close()
        self.buffers = BatchBuffers(
            num_pages * page_size,
            64,
            num_pages,
            page_size,
            torch.device("cpu"),
            torch.zeros(64, dtype=torch.int64),
        )
        self._next_page, self._next_state = 1, 1

    def add(self, max_tokens: int, anchors: tuple[int, ...] = ()) -> Sequence_:
        """Reserve pages for a new sequence."""
        count = -(-max_tokens // self.page_size)
        pages = list(range(self._next_page, self._next_page + count))
        assert pages[-1] < self.max_pages
        self._next_page += count
        self._next_state += 1
        # Pages in descending order: nothing may rely on them being neighbours.
        return Sequence_(pages[::-1], self._next_state - 1, row=self._next_state - 2, anchors=anchors)

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Sequence_, Sequence[int]]], bucket: int = 0) -> Tensor:
        """Run one batch; returns float32 [total rows, V] logits and appends them to the sequences."""
        segments = [
            Segment(
                np.asarray(ids, np.int32),
                seq.num_computed,
                seq.page_ids,
                seq.state_id if "state" in self.pools else 0,
                seq.row,
                anchors=seq.anchors,
            )
            for seq, ids in work
        ]
        batch = self.buffers.fill(segments, bucket)
        h = self.model.hidden(batch, self.experts)
        logits = self.model.head(h, torch.arange(batch.num_live))
        for i, (seq, ids) in enumerate(work):
            seq.logits.append(logits[batch.query_start[i] : batch.query_start[i + 1]])
            seq.num_computed += len(ids)
        return logits

    def run(self, ids: Sequence[int], sizes: Sequence[int] = (), anchors: tuple[int, ...] = ()) -> Tensor:
        """Logits of a whole sequence alone, computed in pieces of `sizes` tokens (default: at once)."""
        seq, at = self.add(len(ids), anchors), 0
        for size in sizes or (len(ids),):
            self.step([(seq, ids[at : at + size])])
            at += size
        assert at == len(ids)
        return torch.cat(seq.logits)
