"""Tokens on their way from the device to the host: the memory that both see, handed out again and again.

A launch reads and writes a piece of it while the host goes on. Invariant: a piece is handed out again only
when the device is through with it and its step was read, or nobody is left who could read it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Protocol

import torch
from torch import Tensor

from freetoken.core.request import TokenLogprob
from freetoken.kernels.sample import Slip


class Mark(Protocol):
    """A point in the order of a device's work, as torch's events are."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Sampled:
    """Tokens of one step; logprobs where they were wanted."""

    def __init__(self, told: Tensor, logprobs: tuple[TokenLogprob | None, ...], mark: Mark | None) -> None:
        self.logprobs = logprobs
        self._told, self._mark = told, mark
        self._read: tuple[list[int], list[bool]] | None = None

    @property
    def is_read(self) -> bool:
        return self._read is not None

    def read(self) -> tuple[list[int], list[bool]]:
        """Ids, and whether their logits were not finite. Waits for this step alone, the first time."""
        if self._read is None:
            if self._mark is not None:
                self._mark.synchronize()
            ids, bad = self._told.tolist()
            self._read = ids, [bool(b) for b in bad]
        return self._read


class Piece:
    """Memory for the slips of up to `rows` choices. mark: the device is through with the last of them."""

    def __init__(self, rows: int, mark: Mark | None) -> None:
        self.rows, self.mark = rows, mark
        self._memory = Slip.memory(rows, locked=torch.cuda.is_available()) if mark is not None else None
        self._reader: weakref.ref[Sampled] | None = None

    def slip(self, rows: int) -> Slip:
        return Slip.fresh(rows) if self._memory is None else Slip.cut(self._memory, rows)

    def sampled(self, slip: Slip, logprobs: tuple[TokenLogprob | None, ...]) -> Sampled:
        """What was told; the piece is the reader's until it has read, or is gone."""
        made = Sampled(slip.told, logprobs, self.mark)
        self._reader = weakref.ref(made)
        return made

    @property
    def free(self) -> bool:
        reader = self._reader() if self._reader is not None else None
        return (reader is None or reader.is_read) and (self.mark is None or self.mark.query())


class Slips:
    """Pieces that last, for a device; the host's own memory needs none. marks: makes one for each."""

    def __init__(self, rows: int, marks: Callable[[], Mark] | None) -> None:
        self._rows, self._marks = rows, marks
        self.pieces: list[Piece] = []

    @contextlib.contextmanager
    def taken(self, rows: int) -> Generator[Piece]:
        """A piece with room for `rows` choices, for the launches of the block."""
        piece = next((p for p in self.pieces if p.rows >= rows and p.free), None)
        if piece is None:
            piece = Piece(
                max(rows, self._rows) if self._marks else rows, self._marks() if self._marks else None
            )
            if self._marks:
                self.pieces.append(piece)
        try:
            yield piece
        finally:
            if piece.mark is not None:
                piece.mark.record()  # behind whatever was launched before something broke
