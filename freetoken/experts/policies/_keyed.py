"""Policies that keep one integer per expert: the smaller the key, the colder the expert.

Owns the key array of all experts, resident or not, and the choice of the coldest and the hottest by
(key, expert id). Doesn't know what a key means. Selection is a partition, not a sort: O(residents) a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.core.interfaces import Ids as Ids
from freetoken.core.interfaces import Policy


def coldest(keys: Ids, ids: Ids, count: int, num_experts_total: int) -> list[int]:
    """Return up to `count` of `ids` by rising (keys[i], ids[i])."""
    count = min(count, ids.size)
    if count <= 0:
        return []
    packed = keys * num_experts_total + ids
    if count == 1:
        return [int(ids[packed.argmin()])]
    if count < ids.size:
        chosen = np.argpartition(packed, count - 1)[:count]
        ids, packed = ids[chosen], packed[chosen]
    found: list[int] = ids[packed.argsort()].tolist()
    return found


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

    def order_victims(
        self, resident: Sequence[int] | Ids, count: int, step: int, lacks: Sequence[int] | Ids | None = None
    ) -> list[int]:
        ids = np.asarray(resident, dtype=np.int64)
        return coldest(self._keys[ids], ids, count, self._total)

    def hottest(self, expert_ids: Sequence[int] | Ids, count: int) -> list[int]:
        """Return up to `count` of `expert_ids` by falling key, ties by lowest id."""
        ids = np.asarray(expert_ids, dtype=np.int64)
        return coldest(-self._keys[ids], ids, count, self._total)
