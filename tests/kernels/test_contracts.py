"""Every maker of an operation against plain formulas in float64, over shapes and edges."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.core import choices
from freetoken.kernels import activation
from freetoken.kernels._choose import choose
from freetoken.kernels._triton import compilations
from freetoken.kernels.attention import attend, attend_decode, attend_exact
from freetoken.kernels.causal_conv import causal_conv
from freetoken.kernels.expert_mlp import expert_mlp, sum_tiles
from freetoken.kernels.gated_delta import chunked, step
from freetoken.kernels.linear import linear, linear_exact
from freetoken.kernels.rms_norm import rms_norm
from freetoken.kernels.rope import rotate

OPS = [name for name in choices.names("freetoken.kernels") if name != "activation"]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(ours: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    assert ours.shape == want.shape
    if want.numel():
        assert float((ours.double() - want.double()).abs().max()) <= bound * (1 + float(want.abs().max()))


@pytest.mark.parametrize("op", OPS)
def test_every_operation_has_a_contract_and_a_reference_that_runs_anywhere(op: str) -> None:
    module = importlib.import_module(f"freetoken.kernels.{op}")
    assert "[" in (module.__doc__ or ""), "the contract gives shapes"
    assert all(choose(module.MAKERS, device).RANK >= 0 for device in ("cpu", "cuda"))
    assert module.MAKERS[0].__name__.endswith(".reference") and module.MAKERS[0].RANK == 0


def test_whoever_waits_for_kernels_hears_of_each_that_is_compiled() -> None:
    triton = pytest.importorskip("triton")
    knobs, heard, told = triton.knobs.runtime, [], []
    knobs.jit_post_compile_hook = lambda **facts: told.append(facts["key"])
    try:
        with compilations(lambda: heard.append(len(told))):
            for key in ("a", "b"):
                knobs.jit_post_compile_hook(key=key)
        knobs.jit_post_compile_hook(key="c")
    finally:
        knobs.jit_post_compile_hook = None
    assert heard == [0, 1] and told == ["a", "b", "c"]


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_linear_is_a_product_and_a_bias(rows: int) -> None:
    x, weight, bias = rand(rows, 24), rand(10, 24), rand(10)
    want = x.double() @ weight.double().t()
    close(linear(x, weight), want)
    close(linear_exact(x, weight), want)
    close(linear_exact(x, weight, bias), want + bias.double())
    close(linear(x.bfloat16(), weight.bfloat16()).float(), want, 0.02)


def test_rms_norm_takes_strided_and_half_precision_input() -> None:
    x, weight = rand(7, 3, 32), rand(16)
    part = x[..., 5:21]
    want = part.double() / (part.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(rms_norm(part, weight, 1e-6), want)
    halved = rms_norm(part.bfloat16(), weight, 1e-6)
    assert halved.dtype == torch.bfloat16
    close(halved, want, 0.02)


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    inverse = 1.0 / 100.0 ** (torch.arange(4) / 4)
    angles = torch.arange(50.0)[:, None] * inverse
    query, key = rand(1, 2, 12).expand(50, -1, -1), rand(1, 2, 12, seed=1).expand(50, -1, -1)
    q, k = (rotate(x, angles.cos(), angles.sin()) for x in (query, key))
    assert torch.equal(q[..., 8:], query[..., 8:]), "dimensions beyond 2 r pass through"
    close(q.square().sum(-1), query.square().sum(-1))
    scores = (q[10:] * k[:-10]).sum(-1)
    close(scores, scores[:1].expand_as(scores))
    assert torch.equal(rotate(query, torch.ones(50, 4), torch.zeros(50, 4)), query)


@pytest.mark.parametrize("name", activation.NAMES)
def test_activations_are_right_and_blind_to_neighbours_and_strides(name: str) -> None:
    x = rand(1000) * 20
    theirs = {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu}.get(name)
    want = theirs(x.double()) if theirs else F.gelu(x.double(), approximate="tanh")
    whole = activation.activate(name, x)
    close(whole, want, 1e-6)
    for start, stop in ((0, 1), (3, 4), (5, 38), (999, 1000)):
        assert torch.equal(activation.activate(name, x[start:stop].clone()), whole[start:stop])
    assert torch.equal(activation.activate(name, x[::3]), whole[::3])
    assert not torch.isnan(activation.activate(name, torch.tensor([-1e30, -200.0, 0.0, 200.0]))).any()


def test_sigmoid_and_softplus_are_right_at_the_ends() -> None:
    x = torch.tensor([-1e30, -200.0, -3.0, 0.0, 3.0, 200.0])
    close(activation.sigmoid(x), torch.sigmoid(x.double()), 1e-6)
    close(activation.softplus(x), F.softplus(x.double(), threshold=1e9), 1e-6)


@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 35])
def test_expert_tiles_sum_to_the_expert(rows: int, exact: bool) -> None:
    x, gate, up, down = rand(rows, 24), rand(32, 24), rand(32, 24, seed=1), rand(24, 32, seed=2)
    tiles = [m.view(4, 8, 24) for m in (gate, up, down.t().contiguous())]
    partials = expert_mlp(x, *tiles, exact=exact)
    assert partials.shape == (4, rows, 24) and partials.dtype == torch.float32
    xd = x.double()
    want = (F.silu(xd @ gate.double().t()) * (xd @ up.double().t())) @ down.double().t()
    close(sum_tiles(partials), want)


def test_expert_tiles_may_have_rows_of_their_own() -> None:
    x, (gate, up, down_t) = rand(3, 5, 24), (rand(3, 8, 24, seed=i) for i in range(3))
    for exact in (False, True):
        both = expert_mlp(x, gate, up, down_t, exact=exact)
        one = torch.stack(
            [
                expert_mlp(x[i], gate[i : i + 1], up[i : i + 1], down_t[i : i + 1], exact=exact)[0]
                for i in range(3)
            ]
        )
        assert torch.equal(both, one)


def test_the_middle_of_an_expert_is_rounded_once_to_the_input_type() -> None:
    x, gate, up, down_t = (m.bfloat16() for m in (rand(5, 24), *(rand(1, 8, 24, seed=i) for i in range(3))))
    g, u = (x.float() @ m[0].float().t() for m in (gate, up))
    middle = (activation.silu(g) * u).bfloat16().float()
    assert torch.equal(expert_mlp(x, gate, up, down_t)[0], middle @ down_t[0].float())


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_the_convolution_carries_its_inputs(kernel: int, length: int) -> None:
    x, weight, past = rand(2, length, 6), rand(kernel, 6), rand(2, 6, kernel - 1)
    inputs = torch.cat([past, x.transpose(1, 2)], 2)
    want = F.silu(F.conv1d(inputs.double(), weight.t().double().unsqueeze(1), groups=6)).transpose(1, 2)
    state = past.clone()
    close(causal_conv(x, state, weight), want)
    assert torch.equal(state, inputs[..., length:])
    again = past.clone()
    parts = torch.cat([causal_conv(x[:, i : i + 1], again, weight) for i in range(length)], 1)
    state = past.clone()
    assert torch.equal(causal_conv(x, state, weight), parts) and torch.equal(state, again)


def delta_inputs(length: int, seed: int = 0) -> tuple[Tensor, ...]:
    return (
        rand(length, 2, 8, seed=seed),
        rand(length, 2, 8, seed=seed + 1),
        rand(length, 4, 12, seed=seed + 2),
        -rand(length, 4, seed=seed + 3).abs(),
        rand(length, 4, seed=seed + 4).sigmoid(),
    )


def delta_by_definition(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token and head by head, in float64."""
    q, k, v, g, beta = (x.double() for x in inputs)
    out, state = torch.zeros_like(v), state.double().clone()
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key, query = (x[t, head // 2] / (x[t, head // 2].square().sum() + 1e-6).sqrt() for x in (k, q))
            held = state[head] * g[t, head].exp()
            held = held + torch.outer(key, beta[t, head] * (v[t, head] - key @ held))
            out[t, head], state[head] = (query * 8**-0.5) @ held, held
    return out, state


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_both_forms_of_the_delta_rule_follow_its_definition(length: int) -> None:
    inputs, start = delta_inputs(length), rand(4, 8, 12)
    want, left = delta_by_definition(inputs, start)
    state = start.clone()
    close(chunked(*inputs, state), want)
    close(state, left)
    state = start[None].clone()
    close(torch.cat([step(*(x[i : i + 1] for x in inputs), state) for i in range(length)]), want)
    close(state[0], left)


def test_the_chunk_grid_starts_anew_at_every_cut() -> None:
    inputs, start = delta_inputs(150), rand(4, 8, 12)
    state, piecewise = start.clone(), start.clone()
    whole = chunked(*inputs, state, [1, 70, 149])
    edges = [0, 1, 70, 149, 150]
    parts = [chunked(*(x[a:b] for x in inputs), piecewise) for a, b in zip(edges, edges[1:], strict=False)]
    close(whole, torch.cat(parts), 1e-6)
    close(state, piecewise, 1e-6)


def test_states_are_handed_out_at_cuts_and_at_the_end() -> None:
    inputs, start = delta_inputs(150), rand(4, 8, 12)
    state, copies = start.clone(), torch.zeros(4, 4, 8, 12)
    saves = list(zip([1, 70, 128, 150], copies, strict=True))
    out = chunked(*inputs, state, [1, 70, 128], saves)
    plain = start.clone()
    assert torch.equal(out, chunked(*inputs, plain, [1, 70, 128])) and torch.equal(state, plain)
    for offset, copy in saves:
        left = start.clone()
        chunked(*(x[:offset] for x in inputs), left, [c for c in (1, 70, 128) if c < offset])
        close(copy, left, 1e-6)


def test_strong_decay_does_not_overflow() -> None:
    q, k, v, g, beta = delta_inputs(70)
    state = rand(4, 8, 12)
    assert torch.isfinite(chunked(q, k, v, g * 1000, beta, state)).all() and torch.isfinite(state).all()


def attention_by_definition(
    q: Tensor, pages: Tensor, length: int, scale: float, window: int | None
) -> Tensor:
    keys, values = (pages[:, i].flatten(0, 1)[:length].double() for i in (0, 1))
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        at = length - len(q) + row
        low = max(0, at - window + 1) if window else 0
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // pages.shape[3])
            weights = (keys[low : at + 1, kv] @ q[row, head].double() * scale).softmax(0)
            out[row, head] = weights @ values[low : at + 1, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (1, 8), (1, 9), (7, 7), (8, 8), (9, 9), (3, 21), (1, 24)]
)
def test_attention_follows_its_definition(rows: int, length: int, kv_heads: int, window: int | None) -> None:
    pages, q = rand(-(-length // 8), 2, 8, kv_heads, 16), rand(rows, 4, 16)
    want = attention_by_definition(q, pages, length, 0.3, window)
    spoiled = pages.clone()  # bytes beyond `length` must not matter
    if length % 8:
        spoiled[-1, :, length % 8 :] = float("nan")
    table = torch.arange(len(pages))
    close(attend(q, spoiled, table, length, 0.3, window), want)
    close(attend_exact(q, spoiled, table, length, 0.3, window), want)


@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_takes_its_share_of_the_softmax_and_gives_nothing(window: int | None) -> None:
    pages, q, sinks = rand(3, 2, 8, 2, 16), rand(5, 4, 16), rand(4)
    plain = attention_by_definition(q, pages, 20, 0.3, window)
    keys, want = pages[:, 0].flatten(0, 1)[:20].double(), plain.clone()
    for row in range(5):
        low = max(0, 16 + row - window) if window else 0
        for head in range(4):
            scores = keys[low : 16 + row, head // 2] @ q[row, head].double() * 0.3
            total = scores.exp().sum()
            want[row, head] *= total / (total + sinks[head].double().exp())
    table = torch.arange(3)
    close(attend(q, pages, table, 20, 0.3, window, sinks), want)
    close(attend_exact(q, pages, table, 20, 0.3, window, sinks), want)


def test_single_tokens_of_many_sequences_read_their_own_pages() -> None:
    pages, q = rand(9, 2, 4, 2, 16), rand(3, 4, 16)
    table = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0], [8, 2, 5, 7]])
    out = attend_decode(q, pages, table, torch.tensor([6, 0, 13], dtype=torch.int32), 0.3)
    for row, length in ((0, 6), (2, 13)):
        own = pages[table[row, : -(-length // 4)]]
        close(out[row : row + 1], attention_by_definition(q[row : row + 1], own, length, 0.3, None))
    assert not out[1].any()
