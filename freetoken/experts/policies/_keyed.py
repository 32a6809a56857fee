"""Policies that keep one integer per expert: the smaller the key, the colder the expert.

Owns the key array of all experts, resident or not, and the choice of the coldest and the hottest by
(key, expert id). Doesn't know what a key means. A key changes only when its expert is touched, so the
order of untouched experts never changes: a kernel needs no ageing pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freetoken.core.interfaces import Policy

Ids = NDArray[np.int64]


class KeyedPolicy(Policy):
    """Orders victims by rising key, ties by lowest id; subclasses write `_keys` in `touch`.

    Pass `resident` as an int64 array where speed matters: a list is converted on every call.
    """

    def reset(self, num_experts_total: int, num_slots: int, experts_per_token: int) -> None:
        self._total = num_experts_total
        self._keys: Ids = np.full(num_experts_total, self.cold_key(), dtype=np.int64)

    def cold_key(self) -> int:
        """The key of an expert that was never touched."""
        return -1

    def order_victims(self, resident: Sequence[int] | Ids, count: int, step: int) -> list[int]:
        return self._extreme(resident, count, 1)

    def hottest(self, expert_ids: Sequence[int] | Ids, count: int) -> list[int]:
        """Return up to `count` of `expert_ids` by falling key, ties by lowest id."""
        return self._extreme(expert_ids, count, -1)

    def _extreme(self, expert_ids: Sequence[int] | Ids, count: int, sign: int) -> list[int]:
        ids: Ids = np.asarray(expert_ids, dtype=np.int64)
        count = min(count, ids.size)
        if count <= 0:
            return []
        packed = sign * self._keys[ids] * self._total + ids
        if count == 1:
            return [int(ids[packed.argmin()])]
        if count < ids.size:
            chosen = np.argpartition(packed, count - 1)[:count]
            ids, packed = ids[chosen], packed[chosen]
        found: list[int] = ids[packed.argsort()].tolist()
        return found
