"""A step that finds no device memory is tried again in smaller chunks; nobody's answer suffers."""

import random

import pytest

from freetoken.core.request import FinishReason

from .toy import Bench, expected


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 97) for _ in range(n)]


@pytest.mark.parametrize("job_bytes", [0, 1])
@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("most_rows", [5, 20, 40])
def test_chunks_are_halved_until_they_fit_and_every_answer_is_right(most_rows, run_ahead, job_bytes):
    """A stream that decodes beside the large prompt loses a step, and no token."""
    bench = Bench(
        slots=20, pages=300, max_prefill_length=64, macro=128, job_bytes=job_bytes, run_ahead=run_ahead
    )
    bench.submit("stream", prompt(1, 3), max_tokens=90, ignore_eos=True)
    bench.steps(6)
    bench.model.most_rows = most_rows
    asked = {f"r{i}": prompt(10 + i, 150) for i in range(2)}
    for name, ids in asked.items():
        bench.submit(name, ids, anchors=[40, 80, 120])
    bench.run()
    assert bench.tokens("stream") == expected(prompt(1, 3), 90, eos=False)
    bench.check_answers(asked, set(), 12)
    assert most_rows / 4 < bench.scheduler.limits.chunk_tokens <= most_rows
    assert bench.engine.stats.halved_chunks >= 1 and bench.engine.stats.failed == 0
    bench.check_empty()


def test_what_was_computed_before_the_shortage_is_not_computed_again():
    bench = Bench(slots=20, pages=300, max_prefill_length=32)
    bench.submit("a", prompt(1, 150), anchors=[32, 64, 96])
    bench.steps(4)
    before = bench.model.num_tokens
    bench.model.most_rows = 20
    bench.run()
    assert before >= 96 and bench.model.num_tokens - before < 150 - 96 + 32 + 12
    bench.check_answers({"a": prompt(1, 150)}, set(), 12)


def test_without_memory_for_a_page_requests_fail_with_an_error_and_serving_goes_on():
    bench = Bench(slots=20, pages=300, max_prefill_length=64)
    bench.model.most_rows = 2
    bench.submit("a", prompt(1, 150))
    bench.run()
    assert bench.finish("a") is FinishReason.ERROR and bench.engine.error is None
    bench.model.most_rows = 1 << 30
    bench.submit("b", prompt(1, 150))
    bench.run()
    bench.check_answers({"b": prompt(1, 150)}, set(), 12)
    bench.check_empty()
