"""A layer's small operations by the tier `neon` in an emulator: the references within rounding.

This machine's library writes down the job; the other one gets it with the memory as it was before.
"""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import attention, delta_decode, gating, norm_linear, rms_norm, rope_store, router
from tests.native.elsewhere import aarch64, call, recorded
from tests.native.test_layer_ops import DTYPES, drawn, near

pytestmark = pytest.mark.timeout(1800)  # the first run compiles


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def answered(arm, job, *tensors):
    (out,) = arm.answers("neon", [call(job, *tensors)])
    return out


def test_norm_alone_and_before_a_product(arm, dtype):
    x, norm = drawn(5, 301, dtype=dtype), drawn(301, seed=1)
    job, y = recorded(lambda: rms_norm.native.rms_norm(x, norm, 1e-6))
    near(answered(arm, job, x, norm, y.zero_())[-1], rms_norm.reference.rms_norm(x, norm, 1e-6), dtype)
    weight, bias = drawn(301, 301, dtype=dtype), drawn(301, dtype=dtype, seed=2)
    if dtype != torch.float32:  # torch's
        job, y = recorded(lambda: norm_linear.native.norm_linear(x, norm, 1e-6, weight, bias))
        want = norm_linear.reference.norm_linear(x, norm, 1e-6, weight, bias)
        near(answered(arm, job, x, norm, weight, bias, y.zero_())[-1], want, dtype)


def test_rotation_and_page_writes(arm, dtype):
    heads, rows, page = rope_store.Heads(6, 2, 20, True), 9, 4
    qkv = drawn(rows, 6 * 20 * 2 + 2 * 2 * 20, dtype=dtype)
    q_norm, k_norm, cos, sin = drawn(20), drawn(20, seed=1), drawn(64, 10), drawn(64, 10, seed=1)
    positions, seqs, live = torch.arange(rows) * 3, torch.arange(rows) % 2, torch.arange(rows) % 7 != 3
    place = rope_store.Place(positions, seqs, live, torch.randperm(40)[:32].view(2, 16) + 1)
    pages = torch.zeros(42, 2, page, 2, 20, dtype=dtype)
    args = (qkv, heads, (q_norm, k_norm, 1e-6), (cos, sin))
    job, out = recorded(lambda: rope_store.native.rope_store(*args, pages, place))
    given = qkv, q_norm, k_norm, cos, sin, positions, seqs, live, place.page_table, out.zero_(), pages.zero_()
    *_, out, written = answered(arm, job, *given)
    want_pages = torch.zeros_like(pages)
    near(out, rope_store.reference.rope_store(*args, want_pages, place), dtype)
    near(written[1:], want_pages[1:], dtype)


@pytest.mark.parametrize("window", [None, 300])
def test_attention_of_one_token(arm, dtype, window):
    q, sinks, context = (
        drawn(3, 22, 20, dtype=dtype),
        drawn(22),
        torch.tensor([0, 257, 700], dtype=torch.int32),
    )
    pages, table = drawn(3 * 44 + 1, 2, 16, 2, 20, dtype=dtype), torch.randperm(3 * 44).view(3, 44) + 1
    args = (table, context, 0.2, window, sinks)
    job, out = recorded(lambda: attention.native.attend_decode(q, pages, *args))
    want = attention.reference.attend_decode(q.float(), pages.float(), *args).to(dtype)
    near(answered(arm, job, q, pages, table, context, sinks, out.zero_())[-1], want, dtype)


def test_one_token_of_gated_delta(arm, dtype):
    sizes = [2 * 2 * 20 + 4 * 24, 4 * 24, 4, 4]
    both = drawn(3, sum(sizes), dtype=dtype)
    layer = delta_decode.Layer(
        conv=drawn(4, sizes[0]), decay=-drawn(4).exp(), dt_bias=drawn(4, seed=1), norm=drawn(24), eps=1e-6,
        activation="silu", heads=(2, 20, 4, 24),
    )  # fmt: skip
    states = drawn(7, sizes[0], 3, dtype=dtype), drawn(7, 4, 20, 24)
    ids, fresh = torch.tensor([3, 6, 1]), torch.tensor([False, True, False])
    inputs, seen = delta_decode.Inputs(*both.split(sizes, -1)), [s.clone() for s in states]
    want = delta_decode.reference.delta_decode(inputs, layer, *seen, ids, fresh)
    before = [s.clone() for s in states]
    job, out = recorded(lambda: delta_decode.native.delta_decode(inputs, layer, *states, ids, fresh))
    for state, old in zip(states, before, strict=True):
        state.copy_(old)
    weights = layer.conv, layer.decay, layer.dt_bias, layer.norm
    *_, out, windows, deltas = answered(arm, job, both, *weights, ids, fresh, out.zero_(), *states)
    near(out, want, dtype, 16.0)
    near(windows, seen[0], dtype)
    near(deltas, seen[1], torch.float32, 64.0)


@pytest.mark.parametrize("kind", sorted(gating.native.KINDS))
def test_gated_products(arm, dtype, kind):
    both = drawn(5, 2 * 301 + 3, dtype=dtype)
    gate, up = both[:, :301], both[:, 301:602]
    job, out = recorded(lambda: gating.native.act_mul(kind, gate, up))
    near(answered(arm, job, both, out.zero_())[-1], gating.reference.act_mul(kind, gate, up), dtype)


def test_sigmoid_gates_of_heads_hide_no_nan(arm, dtype):
    x, gate = drawn(5, 3, 77, dtype=dtype), drawn(5, 3, 77, dtype=dtype, seed=1)
    gate[4, 2] = float("nan")
    job, out = recorded(lambda: gating.native.sigmoid_mul(x, gate))
    out = answered(arm, job, x, gate, out.zero_())[-1]
    assert bool(out[4, 2].isnan().all())
    near(out[:4], gating.reference.sigmoid_mul(x, gate)[:4], dtype)


def test_routed_sums_join_the_residual(arm, dtype):
    h, routed, shared = drawn(5, 301, dtype=dtype), drawn(5, 301, seed=1), drawn(5, 301, dtype=dtype, seed=2)
    gate = drawn(5, 1, dtype=dtype)
    job, out = recorded(lambda: gating.native.add_routed(h, routed, (shared, gate)))
    want = gating.reference.add_routed(h, routed, (shared, gate))
    near(answered(arm, job, h, routed, shared, gate, out.zero_())[-1], want, dtype)
    if dtype != torch.float32:
        job, wide = recorded(lambda: gating.native.widen(h))
        assert torch.equal(answered(arm, job, h, wide.zero_())[-1], h.float())


def test_the_router_chooses_and_weighs_as_its_reference_does(arm, dtype):
    h, norm, weight, live = (
        drawn(6, 72, dtype=dtype),
        drawn(72, seed=1),
        drawn(37, 72, seed=2),
        torch.arange(6) != 4,
    )
    args = (h, norm, 1e-6, weight, 4, True, live)
    job, given = recorded(lambda: router.native.route(*args))
    tensors = h, norm, weight, live, *(t.zero_() for t in given)
    *_, x, ids, weights = answered(arm, job, *tensors)
    want = router.reference.route(*args)
    near(x, want[0], dtype)
    chosen = torch.softmax(x.float() @ weight.t(), -1).topk(4, -1)
    assert torch.equal(ids[live], chosen.indices.sort(-1).values[live].int()) and bool(
        (ids[~live] == -1).all()
    )
    near(
        weights.sort(-1, descending=True).values[live],
        (chosen.values / chosen.values.sum(-1, keepdim=True))[live],
        torch.float32,
        16.0,
    )


@pytest.mark.soak
def test_nothing_is_read_beyond_its_end(tmp_path):
    stress = aarch64(tmp_path, "stress")
    for part in stress.run().split():
        assert "all good" in stress.run(part), part
