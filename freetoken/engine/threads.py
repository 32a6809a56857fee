"""How many threads compute a decode step: tried on real steps, the fastest kept.

What a kernel gains from more threads says little about a step: they also take cores and bandwidth from
whoever serves, and a busy machine punishes the last ones. So each candidate runs a few whole steps, twice,
and the lowest median wins; that costs some dozen steps once. Doesn't know what a step is.
Invariant: an answer doesn't depend on the number of threads, so trying changes time only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from freetoken.core.log import logger

log = logger("threads")
SKIPPED, TIMED, VISITS = 2, 3, 2
"""Steps of a visit that only warm up, that are measured, and visits of each candidate."""
HOPELESS = 1.25
"""A candidate so much slower than the best after the first visits isn't tried again."""
WORTH = 1.02
"""A larger number of threads must gain this much over a smaller one."""
PATIENCE = 64
"""Steps of other sizes in a row after which the trial starts again with their size."""


def candidates(default: int) -> tuple[int, ...]:
    """Numbers of threads worth trying where `default` are at hand: all of these, one less, 3/4, 1/2."""
    return tuple(sorted({n for n in (default, default - 1, default * 3 // 4, default // 2) if n > 0})[::-1])


class ThreadTrial:
    """Told of each decode step; says by `use(threads)` how many the next one runs on.

    chosen   the number kept, 0 while the trial lasts
    """

    def __init__(self, numbers: Sequence[int], use: Callable[[int], None]) -> None:
        self._numbers, self._use = tuple(numbers), use
        self.chosen = self._numbers[0] if len(self._numbers) == 1 else 0
        self._rows = self._others = self._seen = self._visit = 0
        self._times: dict[int, list[float]] = {}
        self._order: list[int] = []
        self._start(0)

    def note(self, rows: int, seconds: float) -> None:
        """A step of `rows` sequences took so long; 0 rows: a step that isn't like others."""
        if self.chosen or not rows:
            return
        if rows != self._rows:
            self._others += 1
            if self._rows and self._others < PATIENCE:
                return
            self._start(rows)
        self._others = 0
        self._seen += 1
        if self._seen > SKIPPED:
            self._times[self._order[0]].append(seconds)
        if self._seen == SKIPPED + TIMED:
            self._next()

    def _start(self, rows: int) -> None:
        self._rows, self._others, self._seen, self._visit = rows, 0, 0, 0
        self._times = {n: [] for n in self._numbers}
        self._order = list(self._numbers)
        if rows:
            self._use(self._order[0])

    def _next(self) -> None:
        self._seen = 0
        del self._order[0]
        if not self._order:
            self._visit += 1
            found = {n: statistics.median(t) for n, t in self._times.items()}
            best = min(found.values())
            if self._visit == VISITS:
                self._choose(found, best)
                return
            self._order = [n for n in self._numbers if found[n] <= best * HOPELESS]
        self._use(self._order[0])

    def _choose(self, found: dict[int, float], best: float) -> None:
        self.chosen = min(n for n, s in found.items() if s <= best * WORTH)
        self._use(self.chosen)
        shown = ", ".join(f"{n}: {1e3 * s:.1f} ms" for n, s in found.items())
        log.info("%d threads compute on the CPU (a step on %s)", self.chosen, shown)
