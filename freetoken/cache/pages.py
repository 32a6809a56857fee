"""Ownership of equal units (KV pages, recurrent states) as integers.

Owns the free list of one pool; knows no bytes and no request. Invariant: every id in 1..num_units-1 is
either free or handed out, exactly once; unit 0 is the pool's dummy and never handed out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from freetoken.core.errors import CapacityError


class UnitAllocator:
    """Hand out unit ids, lowest first, so that the tail stays free for shrinking."""

    def __init__(self, name: str, num_units: int) -> None:
        self.name = name
        self.num_units = num_units
        self._free = list(range(1, num_units))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """Return `count` ids, or raise CapacityError and take none."""
        if count > len(self._free):
            raise CapacityError(
                f"{self.name}: {count} units wanted, {len(self._free)} of {self.num_units - 1} free.",
                code="out_of_units",
                hint="Wait for running requests or give the pool more memory.",
            )
        ids = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(ids)
        return ids

    def give_back(self, ids: Iterable[int]) -> None:
        for unit in ids:
            self._used.remove(unit)
            heapq.heappush(self._free, unit)

    def plan_shrink(self, num_units: int) -> tuple[list[int], list[int]]:
        """Return (src, dst): live units beyond the new end and free places for them.

        CapacityError if the live units don't fit. Nothing changes until `resize`.
        """
        src = sorted(u for u in self._used if u >= num_units)
        dst = sorted(u for u in self._free if u < num_units)[: len(src)]
        if len(dst) < len(src):
            raise CapacityError(
                f"{self.name}: {self.num_used} units are in use, {num_units - 1} would remain.",
                code="pool_in_use",
                hint="Wait for running requests or shrink less.",
            )
        return src, dst

    def resize(self, num_units: int, src: Sequence[int] = (), dst: Sequence[int] = ()) -> dict[int, int]:
        """Adopt a new end after units moved src -> dst. Returns the renaming for the owners."""
        moved = dict(zip(src, dst, strict=True))
        self._used = {moved.get(u, u) for u in self._used}
        if self._used and max(self._used) >= num_units:
            raise ValueError("live units beyond the new end")
        self.num_units = num_units
        self._free = [u for u in range(1, num_units) if u not in self._used]
        return moved

    def check(self) -> None:
        """Raise AssertionError when a unit is lost or owned twice."""
        assert len(set(self._free)) == len(self._free), "a free unit is listed twice"
        assert not self._used & set(self._free), "a unit is free and used"
        assert self._used | set(self._free) == set(range(1, self.num_units)), "a unit is lost"
