"""How many missing tiles the link brings and how many the CPU computes: q* generalised.

One layer-step misses M tiles of s bytes. Q of them are filled, M - Q computed in place, side by side:

    fill branch   t_p(Q) = a_p + Q s / B_p          a_p: launch, first byte, the late product
    CPU branch    t_c(Q) = a_c + (M - Q) s / B_c    a_c: doorbell, wake-up, reading the answer

max(t_p, t_c) is least where they meet (one rises in Q, the other falls), or at an end of [0, M]:

    Q* = clamp(alpha M + beta, 0, M)
    alpha = B_p / (B_p + B_c)        beta = (a_c - a_p) / s * B_p B_c / (B_p + B_c)

B_p and B_c are the rates while BOTH branches run. If memory is saturated, B_c = B_H - B_p, so
alpha = B_p / B_H and, for equal fixed costs and whole experts, Q* = M B_p / B_H: the published q*. If it
isn't, B_c is nearly B_H and the published rule fills too much.

(alpha, beta) are two Q16.16 integers in one 64-bit word per (batch bucket, record class), so a device
can read them while a controller writes them. A credit carries what rounding left, so that the average
share is exact; a floor of M / 16 keeps the cache warming.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ONE = 1 << 16
FLOOR_SHIFT = 4
BUCKETS = 16


def pack(alpha: float, beta: float) -> int:
    """One word: alpha in the low half, beta (tiles) in the high half, both Q16.16 and saturated."""
    low = max(0, min(ONE, round(alpha * ONE)))
    high = max(-(1 << 31), min((1 << 31) - 1, round(beta * ONE)))
    return (high << 32) | low


def unpack(word: int) -> tuple[int, int]:
    """(alpha, beta) as Q16.16 integers."""
    return word & 0xFFFFFFFF, word >> 32


def balance(fill: tuple[float, float], cpu: tuple[float, float]) -> tuple[float, float]:
    """(alpha, beta) for branches given as (fixed cost, cost of a tile) in seconds."""
    (a_p, tau_p), (a_c, tau_c) = fill, cpu
    total = max(tau_p + tau_c, 1e-15)
    return tau_c / total, (a_c - a_p) / total


def bucket_of(rows: int) -> int:
    """Batch bucket: 0 for one row, then a bucket for each doubling."""
    return min(BUCKETS - 1, max(0, rows - 1).bit_length())


@dataclass
class Split:
    """The words, and the credit in Q16.16 tiles."""

    words: NDArray[np.int64]
    credit: int = 0

    @classmethod
    def uniform(cls, word: int, num_classes: int = 1) -> Split:
        return cls(np.full((BUCKETS, num_classes), word, np.int64))

    def tiles_to_fill(self, missing: int, bucket: int, record_class: int = 0) -> int:
        """Q for `missing` tiles, 0 <= Q <= missing. Updates the credit."""
        alpha, beta = unpack(int(self.words[bucket, record_class]))
        most = missing << 16
        wanted = max(0, min(most, alpha * missing + beta))
        wanted = max(wanted, most >> FLOOR_SHIFT)
        if wanted >= most:
            return missing
        due = wanted + self.credit
        filled = max(0, min(missing, due >> 16))
        self.credit = max(-ONE, min(ONE, due - (filled << 16)))
        return filled
