"""The number of threads is found by trying, in a bounded number of steps."""

from __future__ import annotations

import pytest

from freetoken.engine.threads import SKIPPED, TIMED, VISITS, ThreadTrial, candidates


class Machine:
    """`speed` says what a step takes on a number of threads."""

    def __init__(self, numbers, speed):
        self.used, self.speed = [], speed
        self.trial = ThreadTrial(numbers, self.used.append)

    def steps(self, count, rows=1):
        for _ in range(count):
            self.trial.note(rows, self.speed(self.used[-1] if self.used else 0))


def whole(numbers):
    return len(numbers) * VISITS * (SKIPPED + TIMED) + 1


@pytest.mark.parametrize("best", [16, 15, 12, 8])
def test_the_fastest_number_is_kept(best):
    machine = Machine((16, 15, 12, 8), lambda n: 1.0 + abs(n - best) / 100 * 3)
    machine.steps(whole((16, 15, 12, 8)))
    assert machine.trial.chosen == best == machine.used[-1]


def test_a_gain_too_small_to_see_is_not_worth_a_core():
    machine = Machine((4, 3, 2), lambda n: {4: 1.0, 3: 1.01, 2: 1.3}.get(n, 9.0))
    machine.steps(whole((4, 3, 2)))
    assert machine.trial.chosen == 3


def test_a_hopeless_number_is_tried_once():
    machine = Machine((16, 8), lambda n: {16: 9.0, 8: 1.0}.get(n, 1.0))
    machine.steps(100)
    assert machine.used == [16, 8, 8, 8] and machine.trial.chosen == 8


def test_a_step_that_is_not_like_the_others_is_not_counted():
    machine = Machine((2, 1), lambda n: float(n or 1))
    for _ in range(whole((2, 1))):
        machine.steps(1)
        machine.trial.note(0, 1e9)
        machine.trial.note(3, 1e-9)
    assert machine.trial.chosen == 1


def test_the_trial_goes_with_the_size_that_steps_have():
    machine = Machine((2, 1), lambda n: float(n or 1))
    machine.steps(3, rows=1)
    machine.steps(500, rows=2)
    assert machine.trial.chosen == 1


def test_there_is_nothing_to_try_with_one_number():
    machine = Machine((1,), lambda n: 1.0)
    machine.steps(50)
    assert machine.used == [] and machine.trial.chosen == 1


def test_candidates_leave_room_below_what_there_is():
    assert candidates(15) == (15, 14, 11, 7)
    assert [candidates(n) for n in (1, 2, 3, 4)] == [(1,), (2, 1), (3, 2, 1), (4, 3, 2)]
