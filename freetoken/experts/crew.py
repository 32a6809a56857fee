"""How many of the host's threads answer a device, found again and again while serving.

Other programs come and go. A thread that has to share its core is stopped for milliseconds amid its work, and
the device waits for the last one: beside busy programs fewer threads answer sooner. Nobody tells, so now and
then, and at once when answers become slow, another number is tried in turns with the present one.
Knows neither threads nor answers: rates of equal windows in, a number out. Invariant: an answer is the same
on any number of threads, so trying changes time only.
"""

from __future__ import annotations

from collections.abc import Callable

from freetoken.core.log import logger

log = logger("crew")
TURNS = 4
"""Windows of a trial: the other number, the present one, and both again."""
WORTH = 1.03
"""What another number must gain; half of that is noise."""
SLOW = 0.85
"""Two windows of less than this share of the usual rate are news, and so are two that it is this share of."""
WORSE, HOPELESS = 0.9, 0.7
"""A number whose first window is worse than this isn't tried on, and none beyond a hopeless one."""
SOON, SELDOM = 2, 32
"""Windows between trials: behind news, and while there are none."""
USUAL = 0.2
"""Weight of a window in the usual rate."""


def ladder(threads: int) -> tuple[int, ...]:
    """All threads, then a fifth fewer each time, down to about a quarter."""
    found = [threads]
    while found[-1] > max(threads // 4, 1):
        found.append(found[-1] * 4 // 5)
    return tuple(found)


class Crew:
    """use(n): from now on n threads work. Told the rate of each window, in any unit.

    Behind news all numbers are tried, the nearest first: a step down may still share cores and gain nothing.
    While there are none it is the next smaller and the next larger by turns.
    """

    def __init__(self, threads: int, use: Callable[[int], None]) -> None:
        self.numbers = ladder(threads)
        self._use = use
        self._at = 0
        self._to_try: list[int] = []
        self._fewer = False
        self._rest, self._usual, self._news = SOON, 0.0, 0
        self._trial: list[float] | None = None
        self._present = 0.0

    @property
    def number(self) -> int:
        """Threads kept; a trial may use another number for a while."""
        return self.numbers[self._at]

    def note(self, rate: float) -> None:
        """What a window reached."""
        if len(self.numbers) == 1:
            return
        if self._trial is not None:
            self._go_on(rate)
            return
        strange = rate < SLOW * self._usual or SLOW * rate > self._usual > 0
        self._news = self._news + 1 if strange else 0
        if self._news == 2:
            self._look_around()
        self._present = rate
        self._usual += (rate - self._usual) * (USUAL if self._usual else 1.0)
        self._rest -= 1
        if self._rest > 0:
            return
        if not self._to_try:
            self._fewer = not self._fewer
            self._to_try = [self._neighbour(self._fewer)]
        self._trial = []
        self._use(self.numbers[self._to_try[0]])

    def _look_around(self) -> None:
        others = [at for at in range(len(self.numbers)) if at != self._at]
        self._to_try = sorted(others, key=lambda at: abs(at - self._at))
        self._rest = 1

    def _neighbour(self, fewer: bool) -> int:
        last = len(self.numbers) - 1
        return self._at + (1 if (fewer or self._at == 0) and self._at < last else -1)

    def _go_on(self, rate: float) -> None:
        assert self._trial is not None
        self._trial.append(rate)
        if len(self._trial) == 1 and rate < WORSE * self._present:
            self._give_up(rate)
            return
        if len(self._trial) < TURNS:
            self._use(self.numbers[self._at if len(self._trial) % 2 else self._to_try[0]])
            return
        tried, other, present = self._to_try.pop(0), sum(self._trial[::2]), sum(self._trial[1::2])
        self._usual = 2 * present / TURNS
        if other > WORTH * present:
            self._at, self._usual = tried, 2 * other / TURNS
            self._look_around()
            log.debug("%d threads answer the device", self.number)
        self._end()

    def _give_up(self, rate: float) -> None:
        tried, self._usual = self._to_try.pop(0), self._present
        if rate < HOPELESS * self._present:
            down = tried > self._at
            self._to_try = [at for at in self._to_try if (at < tried) == down]
        self._end()

    def _end(self) -> None:
        self._trial, self._news = None, 0
        self._rest = SOON if self._to_try else SELDOM
        self._use(self.number)
