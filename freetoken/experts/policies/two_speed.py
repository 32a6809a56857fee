"""Decayed frequency at two speeds, and a look at the layers still to come in this step.

Reuse falls fast over the first tokens and then slowly, which no single half-life follows. So an expert
keeps two averages of its use, aged once a step by shifts:

    fast -= fast >> 1,  fast += ONE >> 3 when used       recency: the last two or three tokens
    slow -= slow >> 4,  slow += ONE >> 4 when used       frequency: the last few dozen

Its score is their sum. The experts of a later layer are wanted before this layer comes round again, so
among victims their scores count half as much again. A slot that holds part of an expert saves only that
part, and such parts are what each step's division of misses leaves behind: among victims the score of one
that lacks n sixteenths is divided by 1 + n. Q20 integers: int32 holds every value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.experts.policies._keyed import Ids, KeyedPolicy, coldest

ONE = 1 << 20
FAST_AGE, FAST_GAIN = 1, ONE >> 3
SLOW_AGE, SLOW_GAIN = 4, ONE >> 4
AHEAD = 1
SEED_TOKENS = 32
"""Uses in a prompt's last tokens that count as constant use."""
MAX_AGE = 400
"""Steps after which every average has reached its floor, whatever it was."""


class TwoSpeed(KeyedPolicy):
    """Evict the least expected use; fill the misses that are most likely to come again."""

    name = "two_speed"

    def reset(self, num_experts_total: int, num_slots: int, experts_per_token: int) -> None:
        super().reset(num_experts_total, num_slots, experts_per_token)
        self._fast: Ids = np.zeros(num_experts_total, dtype=np.int64)
        self._slow: Ids = np.zeros(num_experts_total, dtype=np.int64)
        self._step = 0
        self._passed = -1

    def cold_key(self) -> int:
        return 0

    def touch(self, expert_ids: Sequence[int], step: int) -> None:
        self._age_to(step)
        ids = np.asarray(expert_ids, dtype=np.int64)
        self._fast[ids] += FAST_GAIN
        self._slow[ids] += SLOW_GAIN
        self._keys[ids] += FAST_GAIN + SLOW_GAIN
        if ids.size:
            self._passed = int(ids[-1])

    def seed(self, expert_ids: Sequence[int], counts: Sequence[int], step: int) -> None:
        """Move the slow averages of the prompt's experts half the way to their use in its last tokens."""
        self._age_to(step)
        ids = np.asarray(expert_ids, dtype=np.int64)
        uses = np.minimum(np.asarray(counts, dtype=np.int64), SEED_TOKENS)
        self._slow[ids] -= self._slow[ids] >> 1
        self._slow[ids] += (uses * ONE // SEED_TOKENS) >> 1
        self._keys[ids] = self._fast[ids] + self._slow[ids]

    def place(self, count: int) -> list[int]:
        return self.hottest(np.flatnonzero(self._keys), count)

    def order_victims(
        self, resident: Sequence[int] | Ids, count: int, step: int, lacks: Sequence[int] | Ids | None = None
    ) -> list[int]:
        ids = np.asarray(resident, dtype=np.int64)
        keys = self._keys[ids]
        keys = keys + np.where(ids > self._passed, keys >> AHEAD, 0)
        if lacks is not None:
            keys = keys // (1 + np.asarray(lacks, dtype=np.int64))
        return coldest(keys, ids, count, self._total)

    def order_fills(self, missing: Sequence[int], step: int) -> list[int]:
        return self.hottest(missing, len(missing))

    def _age_to(self, step: int) -> None:
        if step <= self._step:
            return
        for _ in range(min(step - self._step, MAX_AGE)):
            self._fast -= self._fast >> FAST_AGE
            self._slow -= self._slow >> SLOW_AGE
        self._keys = self._fast + self._slow
        self._step = step


POLICY = TwoSpeed
