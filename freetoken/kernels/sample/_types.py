"""What a draw is asked for with, and where its answer goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ASKED, TOLD = 10, 2
"""Words of a choice on its way to the device, and of its answer."""


class Choice(NamedTuple):
    """How one token is drawn.

    source       row of the logits
    row          row of `last_tokens`
    u            where the cumulative distribution is inverted, in (0, 1)
    temperature  0: the largest logit, the lowest id among equals
    top_k        0 = all; top_p 1 = all; min_p 0 = all
    forced       the id whatever the logits say, -1 = draw
    adjusted     float32 [V] to draw from instead of the row itself, which alone says whether it is bad
    """

    source: int
    row: int
    u: float = 0.5
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    forced: int = -1
    adjusted: Tensor | None = None

    def kept(self, vocab: int) -> int:
        """How many of the largest may be drawn at most; 0: all of them, and their order is of no matter."""
        if 0 < self.top_k < vocab:
            return self.top_k
        return vocab if self.top_p < 1 or self.min_p > 0 else 0


@dataclass(frozen=True)
class Slip:
    """Memory of the host, locked where there is a device that reads and writes it.

    asked  int64 [R, ASKED]   a maker's own notes
    told   int64 [TOLD, R]    drawn ids; 1 where the logits weren't finite
    """

    asked: Tensor
    told: Tensor

    @staticmethod
    def cut(memory: Tensor, rows: int) -> Slip:
        """Of int64 [>= rows * (ASKED + TOLD)]."""
        told = memory[rows * ASKED : rows * (ASKED + TOLD)]
        return Slip(memory[: rows * ASKED].view(rows, ASKED), told.view(TOLD, rows))

    @staticmethod
    def fresh(rows: int) -> Slip:
        """In memory of its own, which no device sees."""
        words = torch.empty(rows, ASKED, dtype=torch.int64)
        return Slip(words, torch.empty(TOLD, rows, dtype=torch.int64))

    @staticmethod
    def memory(rows: int, *, locked: bool) -> Tensor:
        """Room for the slips of up to `rows` choices."""
        return torch.zeros(rows * (ASKED + TOLD), dtype=torch.int64, pin_memory=locked)


def rounding(largest: float, temperature: float) -> float:
    """How near to a border between two tokens, as a share of the mass drawn from, makers may take either.

    A weight is exp(logit / temperature) in float32 arithmetic: its exponent is rounded to 2^-24 of itself.
    largest   the largest |logit|
    """
    return 2.0**-21 * (4 + 2 * largest / temperature)
