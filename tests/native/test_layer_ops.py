"""A layer's small operations by the library: the references within rounding, alike on any threads."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import freetoken
from freetoken.kernels import attention, delta_decode, gating, norm_linear, rms_norm, rope_store, router
from freetoken.kernels.linear import native as native_linear
from freetoken.kernels.linear import reference as plain_linear
from freetoken.native import ops
from tests.native.build import lib

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def drawn(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def near(out, want, dtype, factor: float = 4.0):
    size = float(want.double().abs().max()) + 1e-6
    assert out.shape == want.shape and out.dtype == want.dtype
    assert float((out.double() - want.double()).abs().max()) <= factor * EPS[dtype] * size


def on_threads(run):
    """The same bits on one thread and on three."""
    lib().start(1)
    alone = run()
    lib().start(3)
    shared = run()
    lib().start(2)
    for a, b in zip(alone, shared, strict=True):
        assert torch.equal(a, b)
    return alone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(rows=st.integers(1, 70), width=st.integers(1, 300))
def test_norm(dtype, rows, width):
    x, weight = drawn(rows, width, dtype=dtype), drawn(width, seed=1)
    (out,) = on_threads(lambda: [rms_norm.native.rms_norm(x, weight, 1e-6)])
    near(out, rms_norm.reference.rms_norm(x, weight, 1e-6), dtype)
    assert torch.equal(rms_norm.native.rms_norm(x[-1:], weight, 1e-6), out[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_norm_product_and_residual(dtype, biased, rows):
    x, weight, norm = drawn(rows, 264, dtype=dtype), drawn(301, 264, dtype=dtype), drawn(264, seed=1)
    bias = drawn(301, dtype=dtype, seed=2) if biased else None
    residual = drawn(rows, 301, dtype=dtype, seed=3) * 9
    (out,) = on_threads(lambda: [norm_linear.native.norm_linear(x, norm, 1e-6, weight, bias)])
    near(out, norm_linear.reference.norm_linear(x, norm, 1e-6, weight, bias), dtype)
    (out,) = on_threads(lambda: [native_linear.linear_add(x, weight, bias, residual)])
    near(out, plain_linear.linear_add(x, weight, bias, residual), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_rotation_and_page_writes(dtype, data):
    kv, dim, page = (data.draw(st.sampled_from(v)) for v in ([1, 2, 4], [8, 16, 20, 64], [1, 4, 16]))
    heads = rope_store.Heads(kv * data.draw(st.integers(1, 3)), kv, dim, data.draw(st.booleans()))
    rows, half = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([dim // 2, dim // 4]))
    qkv = drawn(rows, heads.num * dim * (1 + heads.gated) + 2 * kv * dim + 8, dtype=dtype)[:, :-8]
    norms = (drawn(dim), drawn(dim, seed=1), 1e-6) if data.draw(st.booleans()) else None
    angles = (drawn(64, half), drawn(64, half, seed=1))
    table = torch.randperm(40)[:32].view(2, 16) + 1
    place = rope_store.Place(
        torch.arange(rows) % (16 * page) % 64,
        torch.arange(rows) // 24 % 2,
        torch.arange(rows) % 7 != 3,
        table,
    )
    pages = drawn(3, 42, 2, page, kv, dim, dtype=dtype).transpose(0, 1)
    want_pages = pages.clone()
    want = rope_store.reference.rope_store(qkv, heads, norms, angles, want_pages[:, 1], place)
    before = pages.clone()

    def run():
        pages.copy_(before)
        return [rope_store.native.rope_store(qkv, heads, norms, angles, pages[:, 1], place), pages.clone()]

    out, written = run()
    near(out, want, dtype)
    near(written[1:], want_pages[1:], dtype)  # page 0 is the dummy: dead rows race for it
    assert torch.equal(written[:, [0, 2]], before[:, [0, 2]])


def test_positions_beyond_a_table_are_refused_and_nothing_is_written():
    heads, pages = rope_store.Heads(1, 1, 8), torch.zeros(3, 2, 4, 1, 8)
    angles, ones = (torch.ones(6, 4), torch.ones(6, 4)), torch.ones(1, dtype=torch.bool)
    for position, width in ((6, 2), (5, 1), (-1, 2)):
        place = rope_store.Place(
            torch.tensor([position]), torch.zeros(1).long(), ones, torch.ones(1, width).long()
        )
        with pytest.raises(IndexError):
            rope_store.native.rope_store(torch.ones(1, 24), heads, None, angles, pages, place)
    table, context = torch.ones(1, 2).long(), torch.tensor([9], dtype=torch.int32)
    with pytest.raises(IndexError):
        attention.native.attend_decode(torch.ones(1, 1, 8), pages, table, context, 1.0, None, None)
    assert not pages.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_attention_of_one_token(dtype, data):
    kv, dim, page = (data.draw(st.sampled_from(v)) for v in ([1, 2, 4], [8, 16, 20, 72, 128], [1, 4, 16]))
    heads, seqs = kv * data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 9])), data.draw(st.integers(1, 4))
    lengths = [data.draw(st.sampled_from([0, 1, 5, 16, 255, 256, 257, 700])) for _ in range(seqs)]
    window = data.draw(st.sampled_from([None, 3, 300]))
    width = -(-max(max(lengths), 1) // page)
    pages = drawn(2, seqs * width + 1, 2, page, kv, dim, dtype=dtype).transpose(0, 1)[:, 1]
    pages[0] = float("nan")
    table = torch.randperm(seqs * width).view(seqs, width) + 1
    q, sinks = drawn(seqs, heads, dim, dtype=dtype), drawn(heads) if data.draw(st.booleans()) else None
    context = torch.tensor(lengths, dtype=torch.int32)
    args = (pages, table, context, dim**-0.5, window, sinks)
    (out,) = on_threads(lambda: [attention.native.attend_decode(q, *args)])
    near(out, attention.reference.attend_decode(q.float(), pages.float(), *args[1:]).to(dtype), dtype)
    alone = attention.native.attend_decode(q[-1:], pages, table[-1:], context[-1:], *args[3:])
    assert torch.equal(alone, out[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@settings(max_examples=8)
@given(rows=st.integers(1, 32), experts=st.integers(4, 140), top_k=st.integers(1, 4))
def test_router(dtype, normalise, rows, experts, top_k):
    h, norm, weight = drawn(rows, 72, dtype=dtype), drawn(72, seed=1), drawn(experts, 72, seed=2)
    weight[1] = weight[0]  # a tie goes to the lowest
    live = torch.arange(rows) % 5 != 4
    args = (h, norm, 1e-6, weight, top_k, normalise, live)
    x, ids, weights = on_threads(lambda: router.native.route(*args))
    want = router.reference.route(*args)
    near(x, want[0], dtype)
    probs = torch.softmax(x.float() @ weight.t(), -1)
    assert bool((ids[~live] == -1).all()) and bool((weights[~live] == 0).all())
    assert bool((ids[live].diff(dim=1) > 0).all()) if top_k > 1 else True
    assert bool((~(ids == 1).any(1) | (ids == 0).any(1)).all())
    chosen = probs.gather(1, ids.clamp(min=0).long())
    best = probs.topk(top_k, -1).values
    assert bool((chosen.sum(1)[live] >= best.sum(1)[live] - 1e-5).all())
    share = chosen / chosen.sum(1, keepdim=True) if normalise else chosen
    assert float((weights - share)[live].abs().max() if bool(live.any()) else 0) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_one_token_of_gated_delta(dtype, data):
    k_heads, per, k_dim, v_dim, taps = (
        data.draw(st.sampled_from(v)) for v in ([1, 2, 4], [1, 2, 3], [8, 20, 64], [8, 24, 64], [2, 4])
    )
    v_heads, rows = k_heads * per, data.draw(st.integers(1, 5))
    sizes = [2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim, v_heads, v_heads]
    inputs = delta_decode.Inputs(*drawn(rows, sum(sizes), dtype=dtype).split(sizes, -1))
    layer = delta_decode.Layer(
        conv=drawn(taps, sizes[0]), decay=-drawn(v_heads).exp(), dt_bias=drawn(v_heads, seed=1),
        norm=drawn(v_dim), eps=1e-6, activation="silu", heads=(k_heads, k_dim, v_heads, v_dim),
    )  # fmt: skip
    conv = drawn(7, 2, sizes[0], taps - 1, dtype=dtype)
    delta = drawn(7, 2, v_heads, k_dim, v_dim)
    delta[6] = float("nan")
    ids, fresh = torch.tensor([3, 6, 1, 5, 2])[:rows], torch.tensor([False, True, True, False, False])[:rows]
    seen = [conv.clone(), delta.clone()]
    want = delta_decode.reference.delta_decode(inputs, layer, seen[0][:, 1], seen[1][:, 1], ids, fresh)
    before = conv.clone(), delta.clone()

    def run():
        conv.copy_(before[0]), delta.copy_(before[1])
        out = delta_decode.native.delta_decode(inputs, layer, conv[:, 1], delta[:, 1], ids, fresh)
        return [out, conv.nan_to_num(), delta.nan_to_num()]

    out, windows, states = on_threads(run)
    near(out, want, dtype, 16.0)
    near(windows, seen[0], dtype)
    near(states, seen[1].nan_to_num(), torch.float32, 64.0)
    assert torch.equal(windows[:, 0], before[0][:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(rows=st.integers(1, 70), width=st.integers(1, 600), kind=st.sampled_from(sorted(gating.native.KINDS)))
def test_gated_products(dtype, rows, width, kind):
    both = drawn(rows, 2 * width + 3, dtype=dtype)
    gate, up = both[:, :width], both[:, width : 2 * width]
    (out,) = on_threads(lambda: [gating.native.act_mul(kind, gate, up)])
    near(out, gating.reference.act_mul(kind, gate, up), dtype)
    assert torch.equal(gating.native.act_mul(kind, gate[-1:], up[-1:]), out[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(rows=st.integers(1, 40), heads=st.integers(1, 5), dim=st.integers(1, 300))
def test_sigmoid_gates_of_heads(dtype, rows, heads, dim):
    both = drawn(rows, heads * 2 * dim + 5, dtype=dtype)[:, :-5].unflatten(-1, (heads, 2 * dim))
    x, gate = drawn(rows, heads, dim, dtype=dtype), both[..., dim:]
    (out,) = on_threads(lambda: [gating.native.sigmoid_mul(x, gate)])
    near(out, gating.reference.sigmoid_mul(x, gate), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(rows=st.integers(1, 70), width=st.integers(1, 600), shared=st.booleans())
def test_routed_sums_join_the_residual(dtype, rows, width, shared):
    h, routed = drawn(rows, width, dtype=dtype) * 3, drawn(rows, width, seed=1)
    extra = (drawn(rows, width, dtype=dtype, seed=2), drawn(rows, 7, dtype=dtype)[:, 2:3]) if shared else None
    (out,) = on_threads(lambda: [gating.native.add_routed(h, routed, extra)])
    want = gating.reference.add_routed(h, routed, extra)
    near(out, want, dtype)
    assert shared or torch.equal(out, want)
    assert torch.equal(gating.native.widen(h), h.float())


def test_jobs_lie_in_memory_as_the_header_says(tmp_path: Path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    lines = []
    jobs = [*ops.JOBS, ops.Moe, ops.Step]
    for job in jobs:
        name = "ft" + re.sub("([A-Z])", r"_\1", job.__name__).lower()
        lines.append(f'std::printf("%zu ", sizeof({name}));')
        lines += [f'std::printf("%zu ", offsetof({name}, {field[0]}));' for field in job._fields_]
    header = Path(freetoken.__file__).parent / "native" / "layer.h"
    body = f'#include "{header}"\n#include <cstdio>\n#include <cstddef>\nint main() {{ {" ".join(lines)} }}'
    (tmp_path / "sizes.cpp").write_text(body)
    subprocess.run([compiler, "-std=c++20", "sizes.cpp", "-o", "sizes"], cwd=tmp_path, check=True)
    said = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout
    want = []
    for job in jobs:
        want += [ctypes.sizeof(job), *(getattr(job, field[0]).offset for field in job._fields_)]
    assert [int(n) for n in said.split()] == want


@pytest.mark.parametrize("experts", [5, 16, 40])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_router_that_is_no_number_gives_no_numbers(experts, bad):
    """Not finite weights for some experts, which would be served: the sampler has to see it."""
    h, norm, weight = drawn(3, 72), drawn(72, seed=1), drawn(experts, 72, seed=2)
    h[1] = float(bad)
    live = torch.ones(3, dtype=torch.bool)
    _, ids, weights = router.native.route(h, norm, 1e-6, weight, 4, True, live)
    assert ids[1].tolist() == [0, 1, 2, 3] and bool(weights[1].isnan().all())
    assert bool(weights[[0, 2]].isfinite().all())
    weight[3] = float("nan")
    h[1] = 1.0
    _, ids, weights = router.native.route(h, norm, 1e-6, weight, 4, False, live)
    assert bool(weights.isnan().all()) and int(ids.min()) >= 0 and int(ids.max()) < experts


def test_attention_over_what_is_no_number_gives_none_and_others_theirs():
    pages, q = drawn(6, 2, 4, 1, 16), drawn(2, 2, 16)
    table, context = torch.tensor([[1, 2], [3, 4]]), torch.tensor([7, 8], dtype=torch.int32)
    args = (table, context, 0.25, None, None)
    want = attention.native.attend_decode(q, pages, *args)
    for at in ((2, 0, 1), (2, 1, 0)):  # a key amid the context, and a value
        spoiled = pages.clone()
        spoiled[at] = float("nan")
        out = attention.native.attend_decode(q, spoiled, *args)
        assert bool(out[0].isnan().all()) and torch.equal(out[1], want[1])
