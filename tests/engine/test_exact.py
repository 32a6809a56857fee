"""Exact mode: bit-equal over chunking, batch composition, preemption, run-ahead, backends, devices."""

from functools import cache

import pytest

from .served import Trace, alone, serve, text_ids

PROMPT = 70
TOKENS_PAST_A_PAGE = 14
"""Behind 40: three prompts fill nine pages of 16, and all three want a tenth."""


@cache
def oracle(seed: int = 1, n: int = PROMPT, tokens: int = 12) -> Trace:
    """The slow reference: alone, one chunk, all experts in place."""
    return alone(seed, n, tokens, exact=True, device="cpu", moe_backend="fused", max_prefill_length=512)


@pytest.mark.parametrize(("chunk", "prompt"), [(1, 36), *((n, PROMPT) for n in (15, 16, 17, 64))])
def test_chunking_changes_no_bit(chunk, prompt):
    trace = alone(1, prompt, exact=True, device="cpu", moe_backend="fused", max_prefill_length=chunk)
    assert trace == oracle(1, prompt)


def test_the_backend_changes_no_bit():
    assert alone(1, PROMPT, exact=True, device="cpu", moe_backend="cpu") == oracle()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_company_changes_no_bit(run_ahead):
    served = serve(exact=True, device="cpu", moe_backend="fused", max_prefill_length=24, run_ahead=run_ahead)
    for seed in range(5):
        served.submit(f"r{seed}", text_ids(served.built, seed, PROMPT - 9 * abs(seed - 1)))
        served.step(2)
    served.run()
    served.close()
    assert served.trace("r1") == oracle()
    assert served.trace("r4") == oracle(4, PROMPT - 27)


def test_preemption_changes_no_bit():
    served = serve(exact=True, device="cpu", moe_backend="fused", num_tokens=144, max_model_len=144)
    for seed in (1, 2, 3):
        served.submit(f"r{seed}", text_ids(served.built, seed, 40), tokens=TOKENS_PAST_A_PAGE)
    served.run()
    served.close()
    assert served.engine.stats.preemptions > 0
    for seed in (1, 2, 3):
        assert served.trace(f"r{seed}") == oracle(seed, 40, TOKENS_PAST_A_PAGE)
