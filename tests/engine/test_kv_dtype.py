"""Keys and values in one byte: twice the tokens, answers that hardly change, and the same reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.core.errors import ConfigError
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.kernels.attention import attend, attend_decode
from freetoken.kernels.rope_store import reference as store

from .served import Served, serve, text_ids

SIZES = {"device": "cpu", "max_model_len": 2048, "num_tokens": 4096}


@pytest.fixture(scope="module")
def narrow() -> Served:
    return serve(**SIZES, kv_dtype="fp8")


@pytest.fixture(scope="module")
def wide() -> Served:
    return serve(**SIZES)


def logprobs(served: Served, ids: np.ndarray, name: str) -> list[float]:
    served.submit(name, ids, tokens=24)
    served.run()
    return [p for _, p in served.trace(name)]


def test_a_page_takes_half_the_bytes(narrow: Served, wide: Served) -> None:
    sizes = [s.engine.memory._sizes.page_bytes for s in (narrow, wide)]
    assert 2 * sizes[0] == sizes[1]
    states = [s.engine.memory.state_bytes for s in (narrow, wide)]
    assert states[0] == states[1], "states keep their precision"


def test_answers_stay_close_and_a_hit_reuses_as_ever(narrow: Served, wide: Served) -> None:
    ids = text_ids(wide.built, 5, 300)
    first, other = logprobs(narrow, ids, "a"), logprobs(wide, ids, "a")
    assert abs(first[0] - other[0]) < 0.5 and first != other
    logprobs(narrow, ids, "b")
    assert narrow.outputs["b"][-1].cached_tokens >= 300 - 33
    narrow.engine.scheduler.check()


def test_values_beyond_the_range_are_clamped_not_lost() -> None:
    pages = torch.zeros(2, 2, 4, 1, 8, dtype=torch.float8_e4m3fn)
    from freetoken.kernels.rope_store import Heads, Place

    qkv = torch.full((1, 24), 1000.0)
    one = torch.zeros(1, dtype=torch.int64)
    place = Place(one, one, torch.tensor([True]), torch.tensor([[1]]))
    still = (torch.ones(4, 4), torch.zeros(4, 4))
    store.rope_store(qkv, Heads(1, 1, 8), None, still, pages, place)
    kept = pages.float()[1, :, 0, 0]
    assert kept.isfinite().all() and (kept == 448.0).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_narrow_pages_are_read_as_their_values(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, 4, 8, generator=generator)
    narrow = torch.randn(5, 2, 4, 2, 8, generator=generator).to(torch.float8_e4m3fn)
    table = torch.tensor([3, 1, 4])
    wanted = attend(q, narrow.float(), table, 10, 0.3)
    assert torch.equal(attend(q, narrow, table, 10, 0.3), wanted)
    if rows == 1:
        context = torch.tensor([10], dtype=torch.int32)
        assert torch.equal(attend_decode(q, narrow, table[None], context, 0.3), wanted)


def test_exact_mode_refuses_it() -> None:
    with pytest.raises(ConfigError) as e:
        build(Options(device="cpu", exact=True, kv_dtype="fp8"))
    assert e.value.param == "kv_dtype"
