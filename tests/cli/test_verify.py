"""`ft verify`'s judgement: equal, near tie, fault."""

from __future__ import annotations

import pytest

from freetoken.chat.events import TokenInfo
from freetoken.cli import verify
from freetoken.core.options import Options


def token(id: int, logprob: float, runner_up: float = -9.0) -> TokenInfo:
    best = TokenInfo(id, "", b"", logprob)
    return TokenInfo(id, "", b"", logprob, (best, TokenInfo(id + 100, "", b"", runner_up)))


REFERENCE = [token(1, -0.1), token(2, -0.2), token(3, -0.3)]


def test_equal_answers_have_no_fault() -> None:
    finding = verify.compare("cpu", 0, REFERENCE, list(REFERENCE), 0.0)
    assert finding.first_difference is None and not finding.fault(0.0)


def test_another_token_is_a_fault_at_its_place() -> None:
    finding = verify.compare("cpu", 0, REFERENCE, [REFERENCE[0], token(9, -0.2), token(9, -3.0)], 0.1)
    assert finding.first_difference == 1 and finding.tokens == 1 and finding.fault(0.1)


def test_a_near_tie_is_told_from_a_fault() -> None:
    tied = [token(1, -0.7, runner_up=-0.75)]
    finding = verify.compare("cpu", 0, tied, [token(101, -0.7)], 0.1)
    assert finding.near_tie and not finding.fault(0.1)


def test_a_distance_beyond_the_tolerance_is_a_fault() -> None:
    finding = verify.compare("cpu", 0, REFERENCE, [token(1, -0.6), *REFERENCE[1:]], 0.1)
    assert finding.first_difference is None
    assert finding.distance == pytest.approx(0.5)
    assert finding.fault(0.1)


def test_an_answer_that_ends_early_differs() -> None:
    assert verify.compare("cpu", 0, REFERENCE, REFERENCE[:2], 0.1).first_difference == 2


def test_a_backend_that_needs_a_gpu_is_simulated_where_there_is_none() -> None:
    assert verify.placement(Options(), "fused").device == "cpu"
    simulated = verify.placement(Options(), "hybrid")
    assert simulated.device == "sim" and simulated.moe_cache_rate == verify.SLOT_SHARE
    assert verify.placement(Options(moe_cache_size=9), "hybrid").moe_cache_rate is None
    assert verify.placement(Options(device="sim", machine="3090"), "cpu").machine == "3090"
