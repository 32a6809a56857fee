"""Draws of the Triton maker: the reference's tokens, but where u lies within rounding of a border.

Not collected by itself: test_triton.py runs it interpreted and, on a machine with a card, compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.kernels._triton import INTERPRETED
from freetoken.kernels.sample import Choice, Slip, reference, rounding, triton

# numpy's, from the interpreter's loops with run-time bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
PLACE = "cpu" if INTERPRETED else "cuda"
SIZES = [1, 65, 4500] + ([] if INTERPRETED else [8192, 151936, 201088, 262144])
TOP = (1 << 52) - 0.5
US = [0.5 / (1 << 52), 0.31, 0.97, TOP / (1 << 52), 1e-9, 0.62]
LIMITS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 64, "top_p": 0.95},
    {"top_k": 7, "min_p": 0.3},
    {"top_k": 40, "top_p": 1e-9},
    {"top_k": 65},
    {"top_k": 300, "top_p": 0.9, "min_p": 1e-4},
    {"top_p": 0.9},
    {"min_p": 0.01},
    {"top_p": 0.99, "min_p": 0.1},
]

SOME = [LIMITS[0], LIMITS[3], LIMITS[7], LIMITS[10]] if INTERPRETED else LIMITS


def rand(rows: int, vocab: int, *, seed: int = 0, spread: float = 4.0) -> Tensor:
    """Distinct logits, so that no limit cuts between equals."""
    made = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + vocab))
    return (made + torch.arange(vocab) * 2.0**-19).to(PLACE)


def told(
    maker, logits: Tensor, choices: Sequence[Choice], last: Tensor | None = None
) -> tuple[list[int], list[int]]:
    """Ids and bad flags as the host reads them."""
    slip = Slip.cut(Slip.memory(len(choices), locked=not INTERPRETED), len(choices))
    rows = 1 + max(c.row for c in choices)
    last = torch.full((rows,), -1, device=PLACE) if last is None else last
    maker.sample(logits, choices, last, slip)
    if not INTERPRETED:
        torch.cuda.synchronize()
    ids, bad = slip.told.tolist()
    assert [int(last[c.row]) for c in choices] == ids
    return ids, bad


def allowed(logits: Tensor, choice: Choice) -> set[int]:
    """In float64: all tokens within rounding of u, and of what the limits keep."""
    x = logits.double().cpu().numpy()
    kept, finite = choice.kept(len(x)), np.abs(x[np.isfinite(x)]).max()
    slack = rounding(finite, choice.temperature)
    order = np.argsort(-x, kind="stable")[:kept] if kept else np.arange(len(x))
    weight = np.exp((x[order] - x.max()) / choice.temperature)
    weight /= weight.sum()
    upto = weight.cumsum()
    before = upto - weight
    found: set[int] = set()
    for tilt in (-slack, slack):
        keep = np.full(len(order), True)
        if kept:
            keep = before < choice.top_p + tilt
            keep &= weight >= (1 - tilt) * choice.min_p * weight[0]
            keep[0] = True
        goal = choice.u * weight[keep].sum()
        near = (upto > goal - slack) & (before <= goal + slack) & keep & (weight > 0)
        near |= keep & (upto >= upto[keep].max()) & (goal + slack >= upto[keep].max()) & (weight > 0)
        found |= set(order[near].tolist())
    return found


def choices_of(rows: int, **how) -> list[Choice]:
    return [Choice(row, row, **{"u": US[row % len(US)], "temperature": 1.0, **how}) for row in range(rows)]


CASES = [(limits, vocab) for limits in LIMITS for vocab in SIZES if vocab < 4500 or limits in SOME]


@pytest.mark.parametrize(("limits", "vocab"), CASES, ids=str)
def test_both_makers_draw_what_the_rule_allows(limits: dict[str, float], vocab: int) -> None:
    logits = rand(4 if INTERPRETED else 24, vocab)
    choices = choices_of(len(logits), **limits)
    choices[::2] = [c._replace(temperature=0.6) for c in choices[::2]]
    ours, theirs = told(triton, logits, choices), told(reference, logits, choices)
    sets = [allowed(logits[c.source], c) for c in choices]
    assert all(a in some and b in some for a, b, some in zip(ours[0], theirs[0], sets, strict=True))
    assert ours[1] == theirs[1] == [0] * len(choices)
    sure = [i for i, some in enumerate(sets) if len(some) == 1]
    assert [ours[0][i] for i in sure] == [theirs[0][i] for i in sure]
    assert len(sure) >= len(choices) // 3, "a rule that allows anything checks nothing"


@pytest.mark.parametrize("limits", LIMITS[8:], ids=str)
def test_flat_rows_that_keep_more_than_is_listed(limits: dict[str, float]) -> None:
    logits = rand(2, 4500, spread=0.3)
    choices = [c._replace(u=u) for c, u in zip(choices_of(2, **limits), (0.8, 0.3), strict=True)]
    ids, bad = told(triton, logits, choices)
    assert all(token in allowed(logits[c.source], c) for token, c in zip(ids, choices, strict=True))
    assert bad == [0, 0] and all(len(allowed(logits[c.source], c)) <= 3 for c in choices)


@pytest.mark.parametrize("vocab", SIZES)
def test_the_largest_is_taken_and_the_lowest_of_equals(vocab: int) -> None:
    logits = rand(4, vocab)
    logits[1] = 0.5
    logits[2, vocab // 2 :] = logits[2].max()
    logits[3] = torch.where(torch.arange(vocab, device=PLACE) % 2 == 0, -0.0, 0.0)
    choices = [Choice(row, 3 - row) for row in range(4)]
    ids, bad = told(triton, logits, choices)
    assert ids == [int(logits[0].argmax()), 0, int(logits[2].cpu().argmax()), 0] and bad == [0] * 4
    assert told(triton, logits, [c._replace(temperature=0.7, top_k=1) for c in choices])[0] == ids


EQUALS = [(65, 4), (5000, 4), (2100, 100)] + ([] if INTERPRETED else [(5000, 100), (3000, 100)])


@pytest.mark.parametrize(("vocab", "kept"), EQUALS)
def test_equals_at_a_limit_are_kept_by_their_ids(vocab: int, kept: int) -> None:
    logits = torch.zeros(1, vocab, device=PLACE)
    logits[0, vocab - 1] = 1e-3
    order = [vocab - 1, *range(vocab - 1)]
    for u in (1e-6, 0.5101, 1 - 1e-6) if INTERPRETED else (1e-6, 0.2601, 0.5101, 0.7601, 1 - 1e-6):
        (token,), _ = told(triton, logits, [Choice(0, 0, u, 1.0, top_k=kept)])
        assert token == order[int(kept * u)]


@pytest.mark.parametrize("limits", SOME, ids=str)
def test_one_that_stands_out_is_drawn_whatever_u(limits: dict[str, float]) -> None:
    us = [US[0], US[1], US[3]] if INTERPRETED else US  # the least, the largest, one between
    logits = torch.zeros(len(us), 3000, device=PLACE)
    logits[:, 2777] = 150.0
    choices = [Choice(row, row, u, 0.9, **limits) for row, u in enumerate(us)]
    assert set(told(triton, logits, choices)[0]) == {2777}


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-3, 1e4])
def test_temperatures_of_all_sizes_leave_a_token(temperature: float) -> None:
    rows, vocab = (2, 2100) if INTERPRETED else (len(US), 5000)
    logits = rand(rows, vocab)
    for limits in ({}, {"top_k": 20}, {"top_p": 0.99}):
        ids, bad = told(triton, logits, choices_of(rows, temperature=temperature, **limits))
        assert all(0 <= token < vocab for token in ids) and bad == [0] * rows
        if temperature <= 1e-3:
            assert ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("limits", [{"temperature": 0.0}, *SOME], ids=str)
def test_what_is_not_finite_is_told_and_leaves_a_token(limits: dict[str, float]) -> None:
    logits = rand(6, 5000)
    for row, value in ((1, "nan"), (2, "inf"), (4, "-inf")):
        logits[row, 4321] = float(value)
    logits[5] = float("nan")
    choices = choices_of(6, **limits)
    choices[2] = Choice(2, 2, forced=17)
    ids, bad = told(triton, logits, choices)
    assert bad == [0, 1, 1, 0, 1, 1] == told(reference, logits, choices)[1]
    assert all(0 <= token < 5000 for token in ids) and ids[2] == 17


@pytest.mark.parametrize("limits", SOME, ids=str)
def test_adjusted_logits_are_drawn_from_and_the_rows_own_say_whether_they_are_bad(limits) -> None:
    vocab = 5000
    logits, allow = rand(4, vocab), torch.zeros(vocab, dtype=torch.bool, device=PLACE)
    allow[[3, 64, 2047, 2048, 4999]] = True
    other = torch.where(allow, rand(4, vocab, seed=1), -torch.inf)
    logits[2, 5] = float("nan")
    choices = [c._replace(adjusted=other[c.source]) for c in choices_of(4, **limits)]
    choices.append(Choice(3, 4, adjusted=other[3]))
    ids, bad = told(triton, logits, choices)
    assert bad == [0, 0, 1, 0, 0]
    assert all(token in allowed(other[c.source], c) for token, c in zip(ids, choices[:4], strict=False))
    assert ids[4] == int(other[3].argmax()) and allow[torch.tensor(ids)].all()


def test_any_rows_in_any_order_and_nobody_elses_token() -> None:
    logits, last = rand(5, 5000), torch.full((9,), -1, device=PLACE)
    choices = [Choice(4, 2), Choice(1, 7, forced=12), Choice(2, 5, 0.4, 0.8, top_k=9), Choice(0, 0, 0.4, 0.8)]
    ids, bad = told(triton, logits, choices, last)
    assert ids == told(reference, logits, choices)[0] and ids[0] == int(logits[4].argmax()) and not any(bad)
    assert last.tolist() == [ids[3], -1, ids[0], -1, -1, ids[2], -1, ids[1], -1]


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    vocab, rows = (2100, 6) if INTERPRETED else (151936, 32)
    logits = rand(rows, vocab)
    ways = [{"temperature": 0.0}, {}, LIMITS[3], {"top_k": 64}, {"forced": 3}, LIMITS[8]]
    choices = [
        Choice(row, row, **{"u": (row + 0.37) / rows, "temperature": 0.9, **ways[row % len(ways)]})
        for row in range(rows)
    ]
    together = told(triton, logits, choices)[0]
    for row, choice in enumerate(choices):
        alone, _ = told(triton, logits[row : row + 1].clone(), [choice._replace(source=0, row=0)])
        assert alone == [together[row]]
        if not INTERPRETED:
            assert all(told(triton, logits, choices)[0] == together for _ in range(2))


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], device=PLACE)
    rows = 16 if INTERPRETED else 256
    for limits in ({}, {"top_k": 3}):
        choices = [Choice(0, row, (row + 0.5) / rows, 1.0, **limits) for row in range(rows)]
        counts = np.bincount(told(triton, logits, choices)[0], minlength=4)
        kept = logits[0].softmax(-1).cpu().numpy() * ([1, 1, 1, 0] if limits else [1, 1, 1, 1])
        assert np.abs(counts / rows - kept / kept.sum()).max() <= 1 / rows


def test_no_choices_are_no_launch() -> None:
    slip = Slip.cut(Slip.memory(1, locked=False), 0)
    triton.sample(rand(1, 5), [], torch.zeros(1, dtype=torch.int64, device=PLACE), slip)
