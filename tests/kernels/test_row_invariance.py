"""The ground of exact mode: a row's bits depend on that row alone, on this machine's BLAS.

If one of these fails on a new machine, `--exact` promises too much there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.kernels.attention import attend_exact
from freetoken.kernels.expert_mlp import expert_mlp
from freetoken.kernels.gated_delta import step
from freetoken.kernels.linear import linear_exact
from freetoken.kernels.rms_norm import rms_norm


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "out"), [(24, 3), (64, 128), (256, 780), (512, 256), (256, 2048)])
def test_linear_rows(width: int, out: int) -> None:
    x, weight = rand(50, width), rand(out, width)
    whole = linear_exact(x, weight)
    for rows in (slice(0, 1), slice(7, 8), slice(13, 30), slice(49, 50)):
        assert torch.equal(linear_exact(x[rows], weight), whole[rows])
    assert torch.equal(linear_exact(x.flip(0), weight).flip(0), whole)


@pytest.mark.parametrize(("hidden", "width"), [(24, 8), (64, 8), (256, 16), (512, 64)])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
def test_expert_tiles_do_not_see_each_other(hidden: int, width: int, exact: bool) -> None:
    tiles = [rand(12, width, hidden, seed=i).bfloat16() for i in range(3)]
    for rows in (1, 2, 5, 20):
        x = rand(rows, hidden).bfloat16()
        whole = expert_mlp(x, *tiles, exact=exact)
        for run in (slice(0, 1), slice(11, 12), slice(3, 5), slice(2, 11)):
            assert torch.equal(expert_mlp(x, *(t[run] for t in tiles), exact=exact), whole[run])


@pytest.mark.parametrize(("hidden", "width"), [(24, 8), (64, 8), (256, 16)])
def test_expert_rows_in_exact_mode(hidden: int, width: int) -> None:
    x, tiles = rand(40, hidden), [rand(4, width, hidden, seed=i) for i in range(3)]
    whole = expert_mlp(x, *tiles, exact=True)
    for rows in (slice(0, 1), slice(9, 10), slice(5, 30)):
        assert torch.equal(expert_mlp(x[rows], *tiles, exact=True), whole[:, rows])


@pytest.mark.parametrize("page_size", [4, 16, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 4, 16), (4, 1, 16), (8, 2, 64)])
def test_attention_rows(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    length = 3 * page_size + 2
    pages, q = rand(4, 2, page_size, kv_heads, dim), rand(length, heads, dim)
    whole = attend_exact(q, pages, torch.arange(4), length, 0.3)
    for end in (1, page_size - 1, page_size, page_size + 1, length):
        used = torch.arange(-(-end // page_size))
        assert torch.equal(attend_exact(q[end - 1 : end], pages, used, end, 0.3)[0], whole[end - 1])
        assert torch.equal(attend_exact(q[:end], pages, used, end, 0.3), whole[:end])


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (4, 16), (4, 64), (8, 128)])
def test_delta_steps(heads: int, dim: int) -> None:
    q, k, v, g, beta = (rand(9, heads, *tail) for tail in ((dim,), (dim,), (dim,), (), ()))
    start, g, beta = rand(9, heads, dim, dim), -g.abs(), beta.sigmoid()
    state = start.clone()
    whole = step(q, k, v, g, beta, state)
    for rows in (slice(0, 1), slice(4, 5), slice(2, 8)):
        some = start[rows].clone()
        assert torch.equal(step(q[rows], k[rows], v[rows], g[rows], beta[rows], some), whole[rows])
        assert torch.equal(some, state[rows])


@pytest.mark.parametrize("width", [16, 24, 256, 2048])
def test_norm_and_softmax_rows(width: int) -> None:
    x, weight = rand(60, width), rand(width)
    normed, soft = rms_norm(x, weight, 1e-6), x.softmax(-1)
    for rows in (slice(0, 1), slice(31, 32), slice(3, 50)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-6), normed[rows])
        assert torch.equal(x[rows].clone().softmax(-1), soft[rows])
