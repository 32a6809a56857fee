"""The number of threads that answer a device follows what else the machine runs."""

from __future__ import annotations

import random

import pytest

from freetoken.experts.crew import Crew, ladder


class Machine:
    """16 cores; memory gives little beyond 12 threads; one that shares its core holds all others up."""

    def __init__(self, threads: int = 15, noise: float = 0.01) -> None:
        self.busy, self.used, self._noise = 0, threads, noise
        self._random = random.Random(threads)
        self.crew = Crew(threads, self._use)
        self.rates: list[float] = []

    def _use(self, threads: int) -> None:
        self.used = threads

    def rate(self, threads: int) -> float:
        alone = min(threads, 12) + 0.2 * max(threads - 12, 0)
        shared = max(threads + self.busy - 15, 0)
        return alone * (0.6 - 0.02 * shared if shared else 1.0)

    def windows(self, count: int) -> float:
        """The mean rate of so many."""
        for _ in range(count):
            self.rates.append(self.rate(self.used) * self._random.gauss(1, self._noise))
            self.crew.note(self.rates[-1])
        return sum(self.rates[-count:]) / count


def test_the_ladder_goes_down_by_fifths() -> None:
    assert ladder(15) == (15, 12, 9, 7, 5, 4, 3)
    assert [ladder(n) for n in (1, 2, 3, 4)] == [(1,), (2, 1), (3, 2, 1), (4, 3, 2, 1)]


def test_a_quiet_machine_keeps_its_threads_and_pays_little_for_asking() -> None:
    machine = Machine()
    assert machine.windows(3000) > 0.99 * machine.rate(15)
    assert machine.crew.number >= 12


@pytest.mark.parametrize("busy", [4, 6, 8])
def test_beside_busy_programs_fewer_threads_answer(busy: int) -> None:
    machine = Machine()
    machine.windows(100)
    machine.busy = busy
    machine.windows(80)
    best = max(machine.rate(n) for n in machine.crew.numbers)
    assert machine.windows(500) > 0.93 * best > 1.1 * machine.rate(15)


def test_a_change_is_noticed_within_a_trial() -> None:
    machine = Machine()
    machine.windows(400)
    machine.busy = 8
    machine.windows(16)
    assert machine.crew.number < 15


def test_news_that_mean_nothing_cost_little() -> None:
    """The work changes, not the machine: all numbers are asked once, the bad ones for a window."""
    machine = Machine()
    machine.windows(100)
    rate, used = machine.rate, set()
    machine.rate = lambda threads: used.add(threads) or 0.7 * rate(threads)
    assert machine.windows(40) > 0.95 * 0.7 * rate(15)
    assert machine.crew.number >= 12 and min(used) >= 7


def test_threads_come_back_when_the_others_have_gone() -> None:
    machine = Machine()
    machine.busy = 8
    machine.windows(300)
    assert machine.crew.number < 12
    machine.busy = 0
    machine.windows(200)
    assert machine.crew.number >= 12
    assert machine.windows(500) > 0.97 * machine.rate(15)


def test_where_nothing_depends_on_threads_they_stay() -> None:
    machine = Machine(noise=0.0)
    machine.rate = lambda threads: 1.0
    machine.windows(1000)
    assert machine.crew.number == 15


def test_one_thread_is_all_there_is() -> None:
    machine = Machine(1)
    machine.windows(100)
    assert machine.used == 1
