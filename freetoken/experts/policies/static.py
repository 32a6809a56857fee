"""Static placement by frequency: the most used experts stay, nothing is ever evicted.

`seed` gives the frequencies of any earlier use; until then the placement is blind to routing and spreads
over the layers evenly. `placed` is decided at the first `place` or `touch` and never changes: the
baseline that a cache has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.experts.policies._keyed import Ids, KeyedPolicy


class Static(KeyedPolicy):
    """Keep the `num_slots` most frequent experts; fill those only, evict only what isn't one of them."""

    name = "static"

    def reset(self, num_experts_total: int, num_slots: int, experts_per_token: int) -> None:
        super().reset(num_experts_total, num_slots, experts_per_token)
        self._num_slots = num_slots
        self._frozen = False
        self._placed = np.zeros(num_experts_total, dtype=bool)

    def cold_key(self) -> int:
        return 0

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        self._freeze()

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        if not self._frozen:
            self._keys[np.asarray(expert_ids, dtype=np.int64)] += np.asarray(counts, dtype=np.int64)

    def place(self, count: int) -> list[int]:
        self._freeze()
        return self.hottest(np.flatnonzero(self._placed), count)

    def order_victims(
        self, resident: Sequence[int] | Ids, count: int, step: int, lacks: Sequence[int] | Ids | None = None
    ) -> list[int]:
        ids = np.asarray(resident, dtype=np.int64)
        return super().order_victims(ids[~self._placed[ids]], count, step)

    def order_fills(self, missing: Sequence[int], step: int) -> list[int]:
        return [expert for expert in missing if self._placed[expert]]

    def _freeze(self) -> None:
        if self._frozen:
            return
        self._frozen = True
        if self._keys.any():
            chosen = self.hottest(np.arange(self._total), self._num_slots)
        else:
            chosen = [i * self._total // self._num_slots for i in range(min(self._num_slots, self._total))]
        self._placed[chosen] = True


POLICY = Static
