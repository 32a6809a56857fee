"""Memory that a launch may still write is nobody else's: pieces come back once read, or once nobody can."""

import pytest
import torch

from freetoken.core.request import SamplingParams
from freetoken.engine.sampler import Draw, Sampler
from freetoken.engine.slips import Sampled, Slips
from freetoken.kernels.sample import Slip


class Mark:
    """Over once `device` says so, or somebody waits."""

    def __init__(self) -> None:
        self.over, self.records, self.waits = True, 0, 0

    def record(self) -> None:
        self.over, self.records = False, self.records + 1

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over, self.waits = True, self.waits + 1


def launch(slips: Slips, *ids: int) -> tuple[Slip, Sampled]:
    """A step that draws these ids, the last of which is bad."""
    with slips.taken(len(ids)) as piece:
        slip = piece.slip(len(ids))
        slip.told.copy_(torch.tensor([ids, [0] * (len(ids) - 1) + [1]]))
    return slip, piece.sampled(slip, (None,) * len(ids))


def test_a_piece_is_used_again_once_its_step_was_read():
    slips = Slips(4, Mark)
    for step in range(5):
        _, sampled = launch(slips, step, 7)
        assert sampled.read() == ([step, 7], [False, True])
    assert len(slips.pieces) == 1


def test_steps_in_flight_have_a_piece_each():
    slips = Slips(4, Mark)
    steps = [launch(slips, number, number + 10)[1] for number in range(3)]
    assert len(slips.pieces) == 3
    assert [step.read()[0] for step in reversed(steps)] == [[2, 12], [1, 11], [0, 10]]


def test_who_reads_twice_reads_the_same_and_waits_once():
    slips = Slips(4, Mark)
    _, first = launch(slips, 3)
    before = first.read()
    _, second = launch(slips, 4)
    assert first.read() == before == ([3], [True])
    assert slips.pieces[0].mark.waits == 1 and second.read()[0] == [4]


def test_a_step_that_nobody_will_read_keeps_its_piece_until_the_device_is_through():
    slips = Slips(4, Mark)
    launch(slips, 1)  # an engine that fails forgets what is in flight
    mark = slips.pieces[0].mark
    assert launch(slips, 2)[1].read() == ([2], [True])
    assert len(slips.pieces) == 2
    mark.over = True
    launch(slips, 3)
    assert len(slips.pieces) == 2


def test_what_breaks_after_a_launch_leaves_a_mark_behind_it():
    slips = Slips(4, Mark)
    with pytest.raises(RuntimeError), slips.taken(2):
        raise RuntimeError
    assert slips.pieces[0].mark.records == 1 and not slips.pieces[0].free


def test_more_rows_than_ever_get_a_larger_piece():
    slips = Slips(2, Mark)
    launch(slips, 1)[1].read()
    slip, sampled = launch(slips, *range(5))
    assert slip.asked.shape == (5, 10) and sampled.read()[0] == [0, 1, 2, 3, 4]


def test_on_a_cpu_nothing_is_kept():
    sampler = Sampler(3, torch.device("cpu"))
    draws = [Draw(SamplingParams(temperature=0), row, 0) for row in range(2)]
    several = [sampler.sample(torch.tensor([[0.0, step], [step, 1.0]]), draws) for step in (-1.0, 2.0)]
    assert [one.read()[0] for one in several] == [[0, 1], [1, 0]]
    assert not sampler._slips.pieces
