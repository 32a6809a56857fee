"""The slow host executor behind the ABI page: does what an IO block's request says, in torch.

It reads nothing but the block and the bank, as the native executor will: items, rows and x in, float32
sums and partials out. Doesn't know streams, layers of a model or residency. Invariant: an item's output
depends on the item alone, never on the number of workers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.experts.abi import OK, POISONED, IoBlock
from freetoken.experts.bank import ExpertBank
from freetoken.experts.math import ExpertMath, pieces, sum_into
from freetoken.experts.rows import BLOCK, EXACT_BLOCK, Group

Words = NDArray[np.int32]


class CpuExecutor:
    """Runs one request at a time; `threads` workers share its items."""

    def __init__(self, bank: ExpertBank, math: ExpertMath, threads: int = 1) -> None:
        self._bank, self._math = bank, math
        self.threads = max(1, threads)
        self._workers = ThreadPoolExecutor(self.threads, "freetoken-cpu") if self.threads > 1 else None
        self._served = 0

    def serve(self, io: IoBlock, out: Tensor) -> bool:
        """Answer the request in `io`; `out` float32 [out_rows, H] receives the results.

        Returns False, leaving `out` alone, if no new request is visible or the block is poisoned.
        """
        sequence, layer, num_items, num_rows, num_tokens = io.request[:5].tolist()
        if sequence <= self._served:
            return False
        self._served = sequence
        if int(io.poison[0]):
            io.reply[1] = POISONED
            return False
        items: Words = io.items[:num_items].numpy()
        x = torch.cat([io.x[:num_tokens], io.x.new_zeros((1, io.x.shape[1]))])
        rows = io.rows[:num_rows].long()
        rows = torch.where(rows < 0, num_tokens, rows)
        runs = self._runs(items)
        if self._workers is None:
            for run in runs:
                self._run(layer, run, rows, x, out)
        else:
            jobs = [self._workers.submit(self._run, layer, run, rows, x, out) for run in runs]
            for job in jobs:
                job.result()
        io.reply[1], io.reply[0] = OK, sequence
        return True

    def close(self) -> None:
        if self._workers is not None:
            self._workers.shutdown()

    def _runs(self, items: Words) -> list[Words]:
        """Cut the list into neighbours of one shape (rows, first, last), and those among the workers."""
        shape = items[:, [1, 2, 4]]
        cuts = np.flatnonzero((shape[1:] != shape[:-1]).any(1)) + 1
        runs: list[Words] = []
        for run in np.split(items, cuts):
            runs += [part for part in np.array_split(run, min(self.threads, len(run))) if len(part)]
        return runs

    def _run(self, layer: int, items: Words, rows: Tensor, x: Tensor, out: Tensor) -> None:
        first, last, m = (int(v) for v in items[0, [1, 2, 4]])
        experts = items[:, 0].astype(np.int64) % self._bank.num_experts
        row_list = torch.stack([rows[a : a + m] for a in items[:, 3].tolist()])
        group = Group(experts, row_list, 0, EXACT_BLOCK if self._math.exact else min(m, BLOCK))
        each = m if first == 0 else (last - first) * m
        if not (np.diff(items[:, 5]) == each).all():
            for one in np.split(items, len(items)):
                self._run(layer, one, rows, x, out)
            return
        count, tiles = pieces(group, self._bank.layouts[layer], last - first)
        for i in range(0, len(items), count):
            part = group.part(np.arange(i, min(i + count, len(items))))
            records = self._math.gather_records(self._bank.layer(layer), part.experts)
            start = int(items[i, 5])
            slab = out[start : start + len(part.experts) * each].view(len(part.experts), -1, m, out.shape[1])
            for a in range(first, last, tiles):
                b = min(last, a + tiles)
                partials = self._math.partials(layer, x, part, records, a, b)
                if first == 0:
                    sum_into(slab[:, 0], partials, a)
                else:
                    slab[:, a - first : b - first].copy_(partials.transpose(0, 1))
