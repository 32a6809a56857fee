"""A prompt's units beside a running stream: the host, which is quicker, keeps pace with the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from freetoken.engine.prefill import UNITS_AHEAD, PrefillJob

ENQUEUE_S = 0.0005


@dataclass
class Card:
    """Works through what it is given; times are seconds. `host_s`: where the host has got to."""

    host_s: float = 0.0
    busy_until_s: float = 0.0

    @property
    def clock(self) -> Card:
        return self

    @property
    def compute(self) -> Card:
        return self

    def now(self) -> float:
        return self.host_s

    def work(self, seconds: float) -> None:
        self.host_s += ENQUEUE_S
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds

    def record(self) -> Mark:
        return Mark(self, self.busy_until_s)


@dataclass
class Mark:
    card: Card
    at_s: float

    def done(self) -> bool:
        return self.at_s <= self.card.host_s

    def time_s(self) -> float:
        self.card.host_s = max(self.card.host_s, self.at_s)
        return self.at_s


@dataclass
class Units(PrefillJob):
    """A job whose units take known times."""

    card: Card
    seconds: list[float]
    ran: list[float] = field(default_factory=list)
    _unit_s: float = 0.0
    layers: int = 500

    def __post_init__(self) -> None:
        self._model = SimpleNamespace(config=SimpleNamespace(num_layers=self.layers))

    def advance(self) -> bool:
        if not self.seconds:
            return False
        self.ran.append(self.seconds.pop(0))
        self.card.work(self.ran[-1])
        return True


@pytest.mark.parametrize("unit_s", [0.0001, 0.001, 0.003, 0.02])
@pytest.mark.parametrize("gap_s", [0.01, 0.05])
def test_the_device_is_busy_for_as_long_as_it_may_be(unit_s: float, gap_s: float) -> None:
    card = Card(busy_until_s=0.004)  # a step is still running
    job = Units(card, [unit_s] * 1000)
    job.advance_for(card, gap_s)
    slowest = max(unit_s, ENQUEUE_S)
    assert card.busy_until_s < gap_s + UNITS_AHEAD * slowest + 0.001
    assert card.busy_until_s > 0.6 * gap_s, "and is not kept waiting"


def test_units_that_become_slow_are_noticed() -> None:
    card = Card()
    job = Units(card, [0.0001] * 20 + [0.004] * 100)
    job.advance_for(card, 0.05)
    assert card.busy_until_s < 0.05 + (UNITS_AHEAD + 1) * 0.004


def test_a_gap_of_nothing_still_gets_on() -> None:
    card = Card()
    job = Units(card, [0.001] * 3)
    for _ in range(3):
        job.advance_for(card, 0.0)
    assert len(job.ran) == 3


def test_the_end_of_a_job_ends_the_wait() -> None:
    card = Card()
    job = Units(card, [0.001] * 3)
    job.advance_for(card, 1.0)
    assert len(job.ran) == 3 and card.host_s < 0.003, "nobody waits for the last units"


def test_no_gap_is_longer_than_two_sub_chunks_take() -> None:
    card = Card()
    job = Units(card, [0.001] * 100, layers=8)
    job.advance_for(card, 1.0)
    assert len(job.ran) == 16
