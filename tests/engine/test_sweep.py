"""What is reused never shrinks when prompts share one token more: over edges of pages, chunks and windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .served import Served, serve
from .test_real_crowds import EXACT, KINDS, write_model
from .toy import Bench

LENGTH, CHUNK, ANCHORS = 84, 32, (11, 40, 63)
EDGES = sorted({e + d for e in (16, 20, CHUNK, 36, 40, 64, LENGTH - 1) for d in (-1, 0, 1)})
"""Around pages of 16, windows of 20 (behind 0 and behind a page), chunks, an anchor and the end."""


def prompts(shared: int, ids: range) -> tuple[list[int], list[int]]:
    """A prompt, and another that equals it in exactly `shared` tokens."""
    first = [ids[(7 * i + i * i // 5) % len(ids)] for i in range(LENGTH)]
    other = [ids[(ids.index(token) + 1) % len(ids)] for token in first[shared:]]
    return first, [*first[:shared], *other]


def rises(hits: dict[int, int], *, every: int, behind: int = 0) -> None:
    """hits: tokens reused by tokens shared. Past `every` tokens more of the known, more is reused."""
    shared = sorted(hits)
    for less, more in zip(shared, shared[1:], strict=False):
        assert hits[less] <= hits[more], (less, more, hits)
    assert all(found <= n for n, found in hits.items()), hits
    assert all(found >= n - every for n, found in hits.items() if n >= behind), hits


@pytest.mark.parametrize("job_bytes", [0, 1])
def test_on_the_toy_every_token_more_that_is_shared_is_no_token_less_reused(job_bytes):
    hits = {}
    for shared in range(1, LENGTH + 1):
        bench = Bench(slots=40, pages=80, max_prefill_length=8, job_bytes=job_bytes)
        for name, ids in zip("ab", prompts(shared, range(1, 97)), strict=True):
            bench.submit(name, ids, ANCHORS, max_tokens=1)
            bench.run()
        hits[shared] = bench.outputs["b"][-1].cached_tokens
        bench.check_empty()
    rises(hits, every=40)
    assert [hits[n] for n in (10, *ANCHORS)] == [0, *ANCHORS]


@pytest.fixture(scope="module", params=[*KINDS, "windows in pages"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kind = request.param if request.param in KINDS else "sliding_window"
    folder: Path = tmp_path_factory.mktemp("model")
    wishes = {} if kind == request.param else {"window_kv": "pages"}
    options = dict(EXACT, device="cpu", moe_backend="fused", num_tokens=2048, max_prefill_length=CHUNK)
    made = serve(**options, **wishes, model=write_model(kind, folder))
    yield made
    made.close()


@pytest.mark.parametrize("lengths", [EDGES, pytest.param(range(1, LENGTH + 1), marks=pytest.mark.soak)])
def test_on_real_models_every_token_more_that_is_shared_is_no_token_less_reused(served, lengths):
    reuse, hits = served.engine.scheduler.reuse, {}
    for shared in lengths:
        reuse.clear()
        served.outputs.clear()
        for name, ids in zip("ab", prompts(shared, range(3, 120)), strict=True):
            served.submit(name, np.array(ids, np.int32), 1, anchors=ANCHORS)
            served.run()
        hits[shared] = served.outputs["b"][-1].cached_tokens
    if reuse.cache.wants_states():
        rises(hits, every=40)
        assert all(hits[n] >= anchor for anchor in ANCHORS for n in hits if n >= anchor), hits
    else:
        assert all(found == min(n, LENGTH - 1) for n, found in hits.items()), hits
    assert LENGTH not in hits or hits[LENGTH] >= LENGTH - 16 - 5, "an identical prompt: all but the tail"
