"""LRU that starts from the prompt: the experts of a prefill's last tokens are placed before decode.

The key of an expert is the step that last routed to it, shifted to make room below it for how many rows
of a prefill chose it. A seeded expert is as old as the step before decode; among the seeded, the one that
fewer rows chose goes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.experts.policies._keyed import KeyedPolicy

SHIFT = 16


class LruSeeded(KeyedPolicy):
    """Evict what was not routed to for longest; fill misses as routed; start with the prompt's experts."""

    name = "lru_seeded"

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        self._keys[expert_ids] = (step + 1) << SHIFT

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        ids = np.asarray(expert_ids, dtype=np.int64)
        rows = np.minimum(np.asarray(counts, dtype=np.int64), (1 << SHIFT) - 1)
        self._keys[ids] = (step << SHIFT) + rows

    def place(self, count: int) -> list[int]:
        return self.hottest(np.flatnonzero(self._keys >= 0), count)


POLICY = LruSeeded
