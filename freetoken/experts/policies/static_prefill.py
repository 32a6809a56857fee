"""Static placement renewed at every prefill: the prompt's most used experts stay until the next prompt.

Between two prefills nothing is filled or evicted. Published engines that place experts once per prompt do
this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.experts.policies.static import Static


class StaticPrefill(Static):
    """Keep the experts that the last prefill used most."""

    name = "static_prefill"

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        self._frozen = False
        self._placed[:] = False
        self._keys[:] = 0
        self._keys[np.asarray(expert_ids, dtype=np.int64)] = np.asarray(counts, dtype=np.int64)


POLICY = StaticPrefill
