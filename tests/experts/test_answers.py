"""What the host's answers cost, from sums: a line through them."""

from __future__ import annotations

import random

import pytest

from freetoken.experts.poller import Answers


def answers(count: int, fixed: float, tile: float, sizes: list[int], noise: float = 0.0) -> Answers:
    rng, total = random.Random(count), Answers()
    for i in range(count):
        tiles = sizes[i % len(sizes)]
        took = (fixed + tile * tiles) * (1 + noise * rng.uniform(-1, 1))
        more = (took, tiles, 1, tiles * tiles, tiles * took)
        total = Answers(*(a + b for a, b in zip(total, more, strict=True)))
    return total


def test_a_line_through_answers_tells_the_first_tile_from_the_next() -> None:
    fixed, tile = answers(300, 40e-6, 4.5e-6, [3, 9, 20, 35]).line()
    assert fixed == pytest.approx(40e-6) and tile == pytest.approx(4.5e-6)


def test_noise_moves_it_a_little() -> None:
    fixed, tile = answers(300, 40e-6, 4.5e-6, [3, 9, 20, 35], noise=0.2).line()
    assert fixed == pytest.approx(40e-6, rel=0.3) and tile == pytest.approx(4.5e-6, rel=0.15)


@pytest.mark.parametrize("sizes", [[7], [6, 7]])
def test_answers_that_are_all_alike_count_by_the_tile(sizes: list[int]) -> None:
    fixed, tile = answers(50, 40e-6, 4.5e-6, sizes).line()
    assert fixed == pytest.approx(0.0, abs=1e-12) and tile > 4.5e-6


def test_neither_part_ever_is_negative() -> None:
    falling = Answers(
        *(a + b for a, b in zip(answers(9, 80e-6, 0.0, [2]), answers(9, 20e-6, 0.0, [30]), strict=True))
    )
    rising = Answers(
        *(a + b for a, b in zip(answers(9, 5e-6, 0.0, [2]), answers(9, 90e-5, 0.0, [30]), strict=True))
    )
    for one in (falling, rising):
        fixed, tile = one.line()
        assert fixed >= 0 and tile > 0


def test_answers_since_some_before() -> None:
    before, after = answers(3, 1e-5, 1e-6, [4]), answers(8, 1e-5, 1e-6, [4])
    assert after.since(before).requests == 5 and after.since(before).tiles == 20
