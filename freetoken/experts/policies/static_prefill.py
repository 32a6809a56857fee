"""Static placement renewed at every prefill: the prompt's most used experts stay until the next prompt.

Between two prefills nothing is filled or evicted. Published engines that place experts once per prompt do
this. The first seed after a use begins a new placement; a prompt's layers may be seeded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.experts.policies.static import Static


class StaticPrefill(Static):
    """Keep the experts that the last prefill used most."""

    name = "static_prefill"

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        if self._frozen:
            self._frozen = False
            self._placed[:] = False
            self._keys[:] = 0
        super().seed(expert_ids, counts, step)


POLICY = StaticPrefill
