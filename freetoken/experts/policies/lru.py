"""Least recently used, over all layers: the baseline, and the published system's policy.

The key of an expert is the step that last routed to it. Ids rise with the layer, so ties by lowest id
are ties by earliest layer: within a step, too, the order is the order of time. Below one token cycle of
slots (layers * top_k) every expert is gone before its layer comes round again.
"""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.experts.policies._keyed import KeyedPolicy


class Lru(KeyedPolicy):
    """Evict what was not routed to for longest; fill misses as routed."""

    name = "lru"

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        self._keys[expert_ids] = step


POLICY = Lru
