"""Host memory that is locked for a device a little ahead of its use, in a thread of its own.

A card copies to memory that isn't locked only while the caller waits, and locking all that may ever be used
would take it all at once. Rows are used lowest first, so the next few are enough. Knows not what rows hold.
Invariant: a row is locked as a whole or not at all, and using one that isn't only takes longer.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from freetoken.core.interfaces import Device
from freetoken.core.units import align_up
from freetoken.native.library import library

PAGE = 4096
AHEAD = 8


def page_rows(count: int, row_bytes: int) -> Tensor:
    """uint8 [count, row_bytes], taken when first written; large rows share no memory page."""
    if row_bytes < PAGE:
        return torch.empty(count, row_bytes, dtype=torch.uint8)
    step = align_up(row_bytes, PAGE)
    raw = torch.empty(count * step + PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + count * step].view(count, step)[:, :row_bytes]


class LockedAhead:
    """rows: uint8 [n, bytes] of `page_rows`; row 0 is never used. Locking stops at the first refusal."""

    def __init__(self, device: Device, rows: Tensor) -> None:
        self._device, self._rows = device, rows
        self._news = threading.Condition()
        self._wanted = min(1 + AHEAD, len(rows))
        self._next = 1
        self._stopped = rows.stride(0) % PAGE != 0
        self._thread = threading.Thread(target=self._run, name="freetoken-lock", daemon=True)
        self._thread.start()

    @property
    def num_locked(self) -> int:
        return self._next - 1

    def reached(self, row: int) -> None:
        """Row `row` is used from now on. Never waits."""
        end = min(row + 1 + AHEAD, len(self._rows))
        if end > self._wanted:
            with self._news:
                self._wanted = end
                self._news.notify()

    def close(self) -> None:
        """Stop before the next row. Idempotent."""
        with self._news:
            self._stopped = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        self._device.enter()
        lib = library()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._stopped or self._next < self._wanted)
                if self._stopped:
                    return
            row = self._rows[self._next]
            if lib is not None:  # taking memory is the longer part, and this way nobody waits for it
                lib.populate(row.data_ptr(), row.numel())
            if not self._device.pin(row):
                self._stopped = True
            else:
                self._next += 1
