"""How tokens are cut into steps and who else is in the batch: bits in exact mode, bounds in normal mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core.interfaces import ModelFamily
from freetoken.models import gpt_oss, qwen2, qwen3_5_moe, qwen3_moe
from tests.models import checkpoints
from tests.models.runner import Runner

FAMILIES = {
    "gpt_oss": gpt_oss.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 6}
LONG = torch.randint(3, 128, (140,), generator=torch.Generator().manual_seed(2)).tolist()
BOUND = 1e-3
"""Of the largest logit, float32: small outputs of a head are normalised, which magnifies rounding."""


Checkpoint = tuple[str, Path, bool]
"""Family, folder, and whether sliding windows lie in pages instead of rings."""


@pytest.fixture(scope="module", params=[*FAMILIES, "windowed", "windowed in pages"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    windowed = "windowed" in request.param
    name = "qwen3_moe" if windowed else request.param
    path = tmp_path_factory.mktemp(request.param)
    made = checkpoints.write_tiny(path, FAMILIES[name], WINDOWED if windowed else {}, seed=3)
    return name, made, "pages" in request.param


def runner(checkpoint: Checkpoint, *, exact: bool, page_size: int = 4) -> Runner:
    name, path, in_pages = checkpoint
    return Runner(
        FAMILIES[name],
        path,
        exact=exact,
        page_size=page_size,
        num_pages=1200 // page_size,
        num_states=40,
        in_pages=in_pages,
    )


def agree(exact: bool, ours: Tensor, want: Tensor) -> None:
    if exact:
        assert torch.equal(ours, want)
    else:
        assert float((ours - want).abs().max() / want.abs().max()) <= BOUND


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
@pytest.mark.parametrize(
    "length", [1, 4, 5, 65, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 63, 64, 129))]
)
def test_a_prompt_whole_in_chunks_or_by_tokens_gives_the_same(
    checkpoint: Checkpoint, length: int, exact: bool
) -> None:
    run, ids = runner(checkpoint, exact=exact), LONG[:length]
    want = run.run(ids)
    for size in (1, 7, 64):
        sizes = [size] * (length // size) + ([length % size] if length % size else [])
        agree(exact, run.run(ids, sizes), want)


def cuts(total: int) -> st.SearchStrategy[list[int]]:
    inner = st.lists(st.integers(1, total - 1), max_size=5, unique=True).map(sorted)
    return inner.map(lambda at: [b - a for a, b in zip([0, *at], [*at, total], strict=True)])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
def test_any_cut_and_any_anchor_gives_the_same(checkpoint: Checkpoint, exact: bool) -> None:
    run = runner(checkpoint, exact=exact)
    want = run.run(LONG[:70])

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(cuts(70), st.sets(st.integers(0, 75), max_size=4))
    def check(sizes: list[int], anchors: set[int]) -> None:
        run._next_page = run._next_state = 1
        agree(exact, run.run(LONG[:70], sizes, tuple(sorted(anchors))), want)

    check()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_sequence_computes_as_if_alone_whatever_shares_its_batch(
    checkpoint: Checkpoint, page_size: int, exact: bool
) -> None:
    run = runner(checkpoint, exact=exact, page_size=page_size)
    prompts = [LONG[:20], LONG[20:29], LONG[29:30], LONG[30:66], LONG[66:83]]
    want = [run.run(ids) for ids in prompts]
    run._next_page = run._next_state = 1
    seqs = [run.add(len(ids)) for ids in prompts]
    # Mixed prefill and decode: every sequence advances at its own pace, in changing company.
    paces: Sequence[Sequence[int]] = [(5, 1, 3), (1, 1), (1,), (9, 30), (17,)]
    turn = 0
    while any(s.num_computed < len(p) for s, p in zip(seqs, prompts, strict=True)):
        work = []
        for seq, ids, pace in zip(seqs, prompts, paces, strict=True):
            left = len(ids) - seq.num_computed
            if left and (turn + seq.row) % 3:
                count = min(left, pace[turn % len(pace)])
                work.append((seq, ids[seq.num_computed : seq.num_computed + count]))
        if work:
            run.step(work[::-1] if turn % 2 else work)
        turn += 1
    for seq, logits in zip(seqs, want, strict=True):
        agree(exact, torch.cat(seq.logits), logits)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
def test_padding_rows_change_nothing_and_route_nowhere(checkpoint: Checkpoint, exact: bool) -> None:
    run = runner(checkpoint, exact=exact)
    want = run.run(LONG[:12])
    seq, other = run.add(12), run.add(12)
    run.step([(seq, LONG[:9]), (other, LONG[:9])])
    run.experts.routed.clear()
    for i in range(9, 12):
        logits = run.step([(seq, LONG[i : i + 1]), (other, LONG[i : i + 1])], bucket=8)
        agree(exact, logits[0], want[i])
        agree(exact, logits[1], want[i])
    for _, routing in run.experts.routed:
        assert routing.ids.shape[0] == 8
        assert (routing.ids[2:] == -1).all() and (routing.ids[:2] >= 0).all()
        assert (routing.weights[2:] == 0).all()
        assert (routing.ids[:2].diff(dim=1) > 0).all()


def test_threads_change_no_bit_in_exact_mode(checkpoint: Checkpoint) -> None:
    run, threads = runner(checkpoint, exact=True), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run.run(LONG[:12])
        torch.set_num_threads(2)
        agree(True, run.run(LONG[:12], [10, 1, 1]), want)
    finally:
        torch.set_num_threads(threads)


def test_a_pool_that_shrinks_and_grows_keeps_what_is_left(checkpoint: Checkpoint) -> None:
    run = runner(checkpoint, exact=True)
    want = run.run(LONG[:30])
    run._next_page = run._next_state = 1
    seq = run.add(30)
    run.step([(seq, LONG[:11])])
    for pool in run.pools.values():
        full = pool.num_units
        pool.resize(max(seq.page_ids) + 1 if pool.name == "kv" else 3)
        run.step([(seq, LONG[seq.num_computed : seq.num_computed + 4])])
        pool.resize(full)
    run.step([(seq, LONG[seq.num_computed : 30])])
    assert torch.equal(torch.cat(seq.logits), want)


@pytest.mark.parametrize("family", [gpt_oss.FAMILY, qwen3_5_moe.FAMILY], ids=lambda f: f.model_types[0])
def test_a_state_copied_to_another_unit_resumes_there(family: ModelFamily, tmp_path: Path) -> None:
    run = Runner(family, checkpoints.write_tiny(tmp_path, family), exact=True)
    want = run.run(LONG[:50])
    seq = run.add(50)
    run.step([(seq, LONG[:37])])
    run.pools["state"].relocate([seq.state_id], [7])
    run.pools["state"].view()[seq.state_id].fill_(0xFF)
    seq.state_id = 7
    run.step([(seq, LONG[37:50])])
    assert torch.equal(torch.cat(seq.logits), want)
