"""Decayed frequency and recency in one number that never needs ageing.

An expert is worth  v = sum over its uses of 2^-(age / HALF_LIFE),  age in steps. Every v shrinks at the
same rate, so the order between two untouched experts is fixed and  key = log2(v) + now / HALF_LIFE  is a
constant until the next use. With T = now / HALF_LIFE a use of weight w turns the key into

    log2(2^key + w * 2^T) = B + log2(1 + 2^(key - B)),   B = T + log2(w)

All in Q12 integers, the last term from a table: one load, one look-up, one store a use. A short half-life
is LRU, a long one is LFU. int32 keys last 2^19 * HALF_LIFE steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from freetoken.experts.policies._keyed import Ids, KeyedPolicy

HALF_LIFE = 8
ONE = 1 << 12
COLD = -(1 << 30)
_LOW, _HIGH = -16, 16
_GRAIN = 16
MAX_WEIGHT = 1024


def _softplus_table() -> Ids:
    """log2(1 + 2^d) in Q12 for d from _LOW to _HIGH in steps of _GRAIN / ONE."""
    span = range(_LOW * ONE, _HIGH * ONE + 1, _GRAIN)
    return np.array([round(ONE * math.log2(1.0 + 2.0 ** (d / ONE))) for d in span], dtype=np.int64)


def _log2_table() -> Ids:
    """log2(w) in Q12 for w = 1 .. MAX_WEIGHT; entry 0 stands for 1."""
    return np.array([round(ONE * math.log2(max(1, w))) for w in range(MAX_WEIGHT + 1)], dtype=np.int64)


class Decayed(KeyedPolicy):
    """Evict the least decayed frequency; fill the misses that are most likely to come again."""

    name = "decayed"

    def __init__(self, half_life: int = HALF_LIFE) -> None:
        self.half_life = half_life
        self._softplus = _softplus_table()
        self._log2 = _log2_table()

    def cold_key(self) -> int:
        return COLD

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        base = step * ONE // self.half_life
        ids = np.asarray(expert_ids, dtype=np.int64)
        self._keys[ids] = self._raised(self._keys[ids], np.full(ids.size, base, dtype=np.int64))

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        ids = np.asarray(expert_ids, dtype=np.int64)
        weight = np.clip(np.asarray(counts, dtype=np.int64), 1, MAX_WEIGHT)
        base = step * ONE // self.half_life
        self._keys[ids] = self._raised(self._keys[ids], base + self._log2[weight])

    def place(self, count: int) -> list[int]:
        return self.hottest(np.flatnonzero(self._keys > COLD), count)

    def order_fills(self, missing: Sequence[int], step: int) -> list[int]:
        return self.hottest(missing, len(missing))

    def _raised(self, keys: Ids, base: Ids) -> Ids:
        distance = np.clip(keys - base, _LOW * ONE, _HIGH * ONE)
        raised: Ids = base + self._softplus[(distance - _LOW * ONE) // _GRAIN]
        return raised


POLICY = Decayed
