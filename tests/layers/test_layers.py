"""Routers, shared experts, joined projections and rope tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core.model_config import AttentionSpec
from freetoken.kernels.activation import silu
from freetoken.kernels.gating import add_routed
from freetoken.kernels.rope import rotate
from freetoken.layers.embedding import Embedding
from freetoken.layers.linear import Linear
from freetoken.layers.mlp import GatedMLP
from freetoken.layers.moe import Router, SharedExpert
from freetoken.layers.norm import RMSNorm
from freetoken.layers.rope import Rope, frequencies, table_bytes


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
@pytest.mark.parametrize("normalise", [False, True])
@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(rows=st.integers(0, 20), top_k=st.integers(1, 8), seed=st.integers(0, 99))
def test_routes_are_the_best_experts_in_ascending_order(
    normalise: bool, exact: bool, rows: int, top_k: int, seed: int
) -> None:
    h, weight, norm = rand(rows, 16, seed=seed), rand(8, 16, seed=seed), RMSNorm(rand(16), 1e-6)
    live = torch.arange(rows) % 3 != 1
    x, routing = Router(norm, weight, top_k, normalise, exact=exact)(h, live)
    assert torch.equal(x, norm(h))
    assert routing.ids.dtype == torch.int32 and routing.weights.dtype == torch.float32
    probs = (x.double() @ weight.double().t()).softmax(-1)
    for row in range(rows):
        ids, weights = routing.ids[row].tolist(), routing.weights[row]
        if not live[row]:
            assert ids == [-1] * top_k and not weights.any()
            continue
        want = sorted(sorted(range(8), key=lambda e: -float(probs[row, e]))[:top_k])
        assert ids == want
        share = probs[row, want] / (probs[row, want].sum() if normalise else 1.0)
        assert torch.allclose(weights.double(), share, atol=1e-6)


def test_ties_go_to_the_lowest_expert() -> None:
    router = Router(RMSNorm(torch.ones(4), 1e-6), torch.ones(8, 4), 3, True)
    _, routing = router(torch.ones(2, 4), torch.ones(2, dtype=torch.bool))
    assert routing.ids.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(routing.weights, torch.full((2, 3), 1 / 3))


def test_a_16_bit_input_is_routed_in_float32() -> None:
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-12]])
    router = Router(RMSNorm(torch.ones(2), 1e-6), weight, 1, True)
    _, routing = router(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([True]))
    assert routing.ids.tolist() == [[1]], "bf16 logits would tie and fall to expert 0"


@pytest.mark.parametrize("exact", [False, True], ids=["normal", "exact"])
def test_a_joined_projection_is_its_parts(exact: bool) -> None:
    x, parts, biases = rand(5, 16), [rand(n, 16) for n in (3, 8, 1)], [rand(n) for n in (3, 8, 1)]
    joined = Linear(torch.cat(parts), torch.cat(biases), exact=exact)(x)
    apart = [x @ w.t() + b for w, b in zip(parts, biases, strict=True)]
    assert torch.allclose(joined, torch.cat(apart, 1), atol=1e-5)


def test_the_shared_expert_is_weighed_by_its_gate() -> None:
    x, gate, up, share, down = rand(5, 16), rand(8, 16), rand(8, 16, seed=1), rand(1, 16), rand(16, 8)
    mlp = GatedMLP(Linear(torch.cat([gate, up, share])), Linear(down), "silu")
    plain = (silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    assert torch.allclose(mlp(x), plain, atol=1e-5)
    h, routed = rand(5, 16, seed=2), rand(5, 16, seed=3)
    want = h + routed + plain * torch.sigmoid(x @ share.t())
    assert torch.allclose(add_routed(h, routed, SharedExpert(mlp)(x)), want, atol=1e-5)
    assert torch.equal(add_routed(h, routed), h + routed)


def test_norms_add_their_offset_once() -> None:
    x, weight = rand(3, 16), rand(16)
    shifted = RMSNorm(weight, 1e-6, 1.0)(x)
    assert torch.allclose(shifted, RMSNorm(weight + 1.0, 1e-6)(x))


def test_an_embedding_looks_rows_up() -> None:
    table = rand(9, 4)
    assert torch.equal(Embedding(table)(torch.tensor([3, 0])), table[[3, 0]])


def spec(**scaling: object) -> AttentionSpec:
    return AttentionSpec(2, 1, 16, 8, 10000.0, rope_scaling=scaling or None)


def test_a_rope_table_has_a_row_for_every_position() -> None:
    cos, sin = Rope(spec(), 100, torch.device("cpu")).tables
    assert cos.shape == sin.shape == (100, 4)
    assert cos.nbytes + sin.nbytes == table_bytes(spec(), 100) and not table_bytes(None, 100)
    x = rand(2, 3, 16)
    assert torch.equal(rotate(x, cos[[0, 0]], sin[[0, 0]]), x), "position 0 turns nothing"


def test_scaled_frequencies_lie_between_plain_and_stretched() -> None:
    plain, one = frequencies(spec(), 512)
    assert one == 1.0
    common = {"factor": 4.0, "original_max_position_embeddings": 128}
    for scaling in (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", **common},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **common},
    ):
        scaled, factor = frequencies(spec(**scaling), 512)
        assert (scaled <= plain * (1 + 1e-6)).all() and (scaled >= plain / 4 * (1 - 1e-6)).all()
        assert factor >= 1.0
    assert torch.equal(frequencies(spec(rope_type="dynamic", factor=2.0), 512)[0], plain)
