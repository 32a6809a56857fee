"""Int8 activations: the products of the quantised rows, with the same bits in every tier and any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core.errors import ConfigError
from freetoken.core.options import Options
from freetoken.core.weights import CodedWeight
from freetoken.engine.build import build
from freetoken.experts.abi import OK
from freetoken.kernels.coded_linear import native, reference
from freetoken.native.library import library
from tests.native.build import FORMATS, Item, answer, inputs, lib, one, request

TIERS = library().tiers if library() else ()
INT8 = [name for name in FORMATS if library() is not None and library().has_int8(name)]
SIMD = [tier for tier in TIERS if tier != "scalar"]
STATED = 0.025
"""Largest relative error of an expert's output that int8 adds, in the mean square."""


def product(x: Tensor, weight: CodedWeight, bias: Tensor | None, tier: str) -> Tensor:
    """By one tier of the library."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    at = 0 if bias is None else bias.data_ptr()
    places = x.data_ptr(), weight.packed.data_ptr(), at, out.data_ptr()
    kind = lib().format_index(weight.fmt.name, int8=True), native._DTYPES[x.dtype]
    call = lib()._lib.ft_coded_linear
    assert call(lib().tiers.index(tier), *kind, *places, x.shape[0], *weight.shape) == OK
    return out


def index(fmt: str) -> int:
    return lib().format_index(fmt, int8=True)


def coded(fmt: str, rows: int, columns: int, seed: int) -> CodedWeight:
    form = FORMATS[fmt]
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    packed = torch.empty(form.matrix_bytes(rows, columns), dtype=torch.uint8)
    form.pack_matrix(form.encode(matrix), packed)
    return CodedWeight(form, packed, (rows, columns))


def test_formats_of_plain_numbers_and_fp8_keep_16_bits():
    assert {"q8_0", "q4_k", "q6_k", "mxfp4", "iq4_xs", "int4_zp_g128"} <= set(INT8)
    assert not {"bf16", "f16", "f32", "fp8_block", "iq3_s"} & set(INT8)


@pytest.mark.parametrize("fmt", INT8)
@settings(max_examples=5)
@given(data=st.data())
def test_a_dense_product_is_that_of_the_quantised_rows_bit_equal_in_every_tier(fmt, data):
    unit = max(FORMATS[fmt].columns_multiple, 32)
    columns = unit * data.draw(st.integers(1, 640 // unit), "columns")
    rows, tokens = data.draw(st.sampled_from([1, 2, 16, 37])), data.draw(st.sampled_from([1, 2, 3, 9, 40]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    weight, x = coded(fmt, rows, columns, tokens), inputs(tokens, columns, dtype, seed=rows)
    x[0, : columns // 2] = 0
    bias = inputs(1, rows, dtype, seed=3)[0] if data.draw(st.booleans(), "bias") else None
    outs = [product(x, weight, bias, tier) for tier in TIERS]
    assert all(torch.equal(out, outs[0]) for out in outs)
    numbers, given = weight.decode(torch.arange(rows)).double(), reference.octets(x.float()).double()
    want = given @ numbers.t() + (0 if bias is None else bias.double())
    eps = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    bound = eps * want.abs() + 2e-6 * (given.abs() @ numbers.abs().t()) + 1e-6
    assert bool(((outs[0].double() - want).abs() <= bound).all())
    alone = [product(x[i : i + 1], weight, bias, lib().tier)[0] for i in range(tokens)]
    assert torch.equal(torch.stack(alone), outs[0])


@pytest.mark.parametrize("fmt", INT8)
@settings(max_examples=2)
@given(data=st.data())
def test_an_expert_is_near_float64_and_has_one_answer(fmt, data):
    unit = max(FORMATS[fmt].columns_multiple, 32)
    hidden = unit * data.draw(st.integers(1, 320 // unit or 1), "hidden")
    tile = data.draw(st.sampled_from([w for w in (16, 32, 64, 128, 256) if w % FORMATS[fmt].block == 0]))
    made = one(fmt, hidden, 2 * tile, tile, 2, seed=hidden)
    x = inputs(20, hidden, torch.bfloat16, seed=tile)
    items = [Item(0, list(range(20))), Item(1, [3, -1, 5]), Item(1, [7, 7], 1)]
    outs = {tier: answer(made, request(made, x, items), tier, format=index(fmt)) for tier in TIERS}
    assert all(torch.equal(outs[tier], outs[SIMD[0]]) for tier in SIMD)
    plain = answer(made, request(made, x, items))
    for out in outs.values():
        error = (out - plain).double().square().sum() / plain.double().square().sum()
        assert 0 < float(error.sqrt()) <= STATED
    for row in (0, 19):
        alone = answer(made, request(made, x, [Item(0, [row])]), SIMD[0], format=index(fmt))
        if 2 * tile <= 64:  # one chunk: more tiles are cut by how many rows share them
            assert torch.equal(alone[0], outs[SIMD[0]][row])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fmt", INT8)
def test_rows_alone_in_pairs_and_in_panels_have_the_same_bits(fmt, tier):
    unit = max(FORMATS[fmt].columns_multiple, 32)
    hidden, tile = unit * (300 // unit + 1), FORMATS[fmt].block * (48 // FORMATS[fmt].block + 1)
    made, x = one(fmt, hidden, tile, tile, 1), inputs(7, hidden, torch.bfloat16)
    weight = coded(fmt, 37, hidden, 1)
    whole = answer(made, request(made, x, [Item(0, list(range(7)))]), tier, format=index(fmt))
    products = product(x, weight, None, tier)
    for count in (1, 2, 5):
        few = list(range(7 - count, 7))
        assert torch.equal(
            answer(made, request(made, x, [Item(0, few)]), tier, format=index(fmt)), whole[few]
        )
        assert torch.equal(product(x[few], weight, None, tier), products[few])


def test_threads_change_no_bit():
    made, x = one("q4_k", 512, 1024, 256), inputs(9, 512, torch.bfloat16)
    weight = coded("q4_k", 700, 512, 1)
    items = [Item(0, list(range(9))), Item(1, [2]), Item(2, [0, 4])]
    seen = []
    for threads in (1, 3):
        lib().start(threads)
        seen.append(
            (
                answer(made, request(made, x, items), format=index("q4_k")),
                product(x, weight, None, lib().tier),
            )
        )
    lib().start(2)
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("tier", TIERS)
def test_nan_stays_nan_and_tiny_rows_are_zero(tier):
    weight, x = coded("q8_0", 32, 64, 1), torch.zeros(4, 64)
    x[1, 40], x[2], x[3, 5] = float("nan"), 1e-38, float("inf")
    out = product(x, weight, None, tier)
    assert bool((out[[0, 2]] == 0).all()) and bool(out[[1, 3]].isnan().all())


def test_what_cannot_use_it_is_refused():
    for wishes in ({"device": "sim"}, {"device": "cpu", "exact": True}):
        with pytest.raises(ConfigError) as e:
            build(Options(cpu_activations="int8", **wishes))
        assert e.value.param == "cpu_activations"


def test_the_option_reaches_whoever_computes():
    built = build(Options(device="cpu", cpu_activations="int8", max_model_len=64, num_tokens=128))
    try:
        assert built.engine.runner.model.numerics.int8
    finally:
        built.engine.close()
