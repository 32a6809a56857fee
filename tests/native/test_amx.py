"""AMX: many rows are within their bound, bit-equal in any company of so many, and torch is left alone; few
rows of four-bit codes are multiplied as bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.core.weights import CodedWeight
from freetoken.experts.abi import OK
from freetoken.kernels.coded_linear import native
from freetoken.native.library import library
from tests.native.build import EPS, EPS32, FORMATS, Item, answer, inputs, lib, one, reference, request, within
from tests.native.test_int8 import coded

TIERS = library().tiers if library() else ()
AMX, BELOW = "amx", "avx512_bf16"
LEAST = 16
"""Rows of an expert from which on the tiles compute; dense products begin with one more."""
MULTIPLIED = [f for f in FORMATS if f not in ("f16", "f32")]
DENSE = [f for f in MULTIPLIED if f != "bf16"]
AS_BYTES = ["mxfp4", "nvfp4", "q4_k", "q4_0", "q4_1", *(f for f in FORMATS if f.startswith("int4"))]
pytestmark = pytest.mark.skipif(
    AMX not in TIERS, reason="no AMX: this CPU lacks it, or its system or the compiler does"
)


@pytest.fixture(autouse=True)
def _two_threads():
    yield
    lib().start(2)


def product(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype)
    at = 0 if bias is None else bias.data_ptr()
    places = x.data_ptr(), weight.packed.data_ptr(), at, out.data_ptr()
    kind = lib().format_index(weight.fmt.name), native._DTYPES[x.dtype]
    status = lib()._lib.ft_coded_linear(TIERS.index(AMX), *kind, *places, x.shape[0], *weight.shape)
    assert status == OK
    return out


@pytest.mark.parametrize("rows", [LEAST, 33, 128, 129, 300])
@pytest.mark.parametrize("fmt", ["bf16", "q8_0", "q4_k", "nvfp4", "fp8_block", "iq3_s"])
def test_many_rows_of_experts_of_many_tiles_are_within_their_bound(fmt, rows):
    """More columns than are multiplied at a time, and rows that are cut in parts."""
    made = one(fmt, 256, 1280, 256, 1, biased=True)
    x = inputs(rows, 256, torch.bfloat16)
    items = [Item(0, list(range(rows)))]
    want, bound = reference(made, x, items)
    within(answer(made, request(made, x, items), AMX), want, 2 * bound)


@pytest.mark.parametrize("fmt", MULTIPLIED)
def test_a_row_has_the_same_bits_wherever_it_stands_among_enough(fmt):
    made = one(fmt, 256, 256, 256, 1)
    x = inputs(61, 256, torch.bfloat16)
    whole = answer(made, request(made, x, [Item(0, list(range(61)))]), AMX)
    for count in (LEAST, 17, 32, 48):
        rows = list(range(60, 60 - count, -1))
        assert torch.equal(answer(made, request(made, x, [Item(0, rows)]), AMX), whole[rows]), count


@pytest.mark.parametrize("fmt", ["bf16", "q5_k", "q4_k"])
def test_few_rows_of_other_codes_and_other_types_are_the_tier_belows(fmt):
    made = one(fmt, 256, 512, 256, 1)
    for dtype, rows in ((torch.bfloat16, LEAST - 1), (torch.float16, 40), (torch.float32, 40)):
        if fmt in AS_BYTES and dtype == torch.bfloat16:
            continue
        x = inputs(rows, 256, dtype)
        io = request(made, x, [Item(0, list(range(rows)))])
        assert torch.equal(answer(made, io, AMX), answer(made, io, BELOW)), dtype


@pytest.mark.parametrize("fmt", ["bf16", "q4_k"])
def test_rows_of_other_types_that_are_computed_in_parts_are_prepared_for_each_chunk(fmt):
    made, x = one(fmt, 256, 2560, 256, 1), inputs(40, 256, torch.float16)
    items = [Item(0, list(range(40)))]
    want, bound = reference(made, x, items)
    lib().start(1)
    within(answer(made, request(made, x, items), AMX), want, 2 * bound)


@pytest.mark.parametrize("fmt", AS_BYTES)
@pytest.mark.parametrize("largest", [1.0, 3000.0, 1e15, 1e-30])
def test_few_rows_keep_what_is_small_beside_what_is_large(fmt, largest):
    """A block of x has one power of two, which its largest element decides."""
    unit = FORMATS[fmt].columns_multiple
    hidden = unit * (400 // unit + 1)
    made = one(fmt, hidden, 512, 256, 1)
    x = inputs(7, hidden, torch.bfloat16)
    if largest < 1:
        x *= largest
    else:
        x[:, 3::100] *= largest
    items = [Item(0, list(range(7)))]
    want, bound = reference(made, x, items)
    within(answer(made, request(made, x, items), AMX), want, bound)


@pytest.mark.parametrize("fmt", AS_BYTES)
def test_few_rows_are_as_near_to_float64_as_the_tier_belows(fmt):
    made, x = one(fmt, 1024, 512, 256, 1), inputs(6, 1024, torch.bfloat16)
    items = [Item(0, list(range(6)))]
    want, _ = reference(made, x, items)
    io = request(made, x, items)
    ours, theirs = ((answer(made, io, tier).double() - want).square().mean() for tier in (AMX, BELOW))
    assert float(ours) <= 1.1 * float(theirs)


@pytest.mark.parametrize("fmt", AS_BYTES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_the_largest_levels_and_elements_fit(fmt, sign):
    """Every weight and every element of x is the largest of its block."""
    made = one(fmt, 1024, 256, 256, 1)
    gate, up = torch.ones(256, 1024), torch.full((256, 1024), sign)
    made.bank.put(0, 0, gate, up, up.t())
    io = request(made, torch.full((2, 1024), 1.9921875, dtype=torch.bfloat16), [Item(0, [0, 1])])
    out = answer(made, io, AMX)
    assert torch.allclose(out, torch.full_like(out, 256 * (1024 * 1.9921875) ** 2), rtol=0.02)
    assert torch.allclose(out, answer(made, io, BELOW), rtol=2**-7)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4_g32", "q4_0"])
def test_weights_that_are_zero_give_zero(fmt):
    zeros = torch.zeros(256, 256)
    made = one(fmt, 256, 256, 256, 1)
    made.bank.put(0, 0, torch.ones(256, 256), torch.ones(256, 256), zeros)
    x = inputs(3, 256, torch.bfloat16)
    out = answer(made, request(made, x, [Item(0, [0, 1, 2])]), AMX)
    assert bool((out == 0).all())


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "q4_k"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(fmt, bad):
    made, x = one(fmt, 512, 256, 256, 1), inputs(4, 512, torch.bfloat16)
    x[2, 300] = bad
    out = answer(made, request(made, x, [Item(0, [0, 1, 2, 3])]), AMX)
    assert bool(out[2].isnan().all()) and bool(torch.isfinite(out[[0, 1, 3]]).all())


@pytest.mark.parametrize("fmt", DENSE)
@pytest.mark.parametrize("rows", [17, 300])
def test_a_dense_product_of_many_rows_is_within_its_bound(fmt, rows):
    weight = coded(fmt, 75, 512, seed=rows)
    x, bias = inputs(rows, 512, torch.bfloat16), inputs(1, 75, torch.bfloat16)[0]
    numbers = weight.decode(torch.arange(75)).double()
    want = x.double() @ numbers.t() + bias.double()
    size = x.double().abs() @ numbers.t().abs() + bias.double().abs()
    error = (product(x, weight, bias).double() - want).abs()
    assert bool((error <= (512 + 64) * EPS32 * size + EPS[torch.bfloat16] * want.abs()).all())


def test_dense_rows_have_the_same_bits_in_any_company_and_on_any_threads():
    weight, x = coded("q4_k", 700, 512, seed=1), inputs(600, 512, torch.bfloat16)
    lib().start(1)
    whole = product(x, weight, None)
    for threads in (2, 3):
        lib().start(threads)
        assert torch.equal(product(x, weight, None), whole)
    for count in (17, 100):
        assert torch.equal(product(x[-count:].contiguous(), weight, None), whole[-count:])


def test_the_thread_count_never_changes_a_bit_of_many_rows():
    made = one("bf16", 512, 512, 32, 3)
    x = inputs(200, 512, torch.bfloat16)
    io = request(made, x, [Item(e, list(range(m))) for e, m in enumerate((200, 40, 16))])
    lib().start(1)
    want = answer(made, io, AMX)
    for threads in (2, 3, 2):
        lib().start(threads)
        assert torch.equal(answer(made, io, AMX), want)


def test_torch_and_the_library_use_the_registers_by_turns():
    """oneDNN configures and releases them as well."""
    made, x = one("bf16", 256, 256, 256, 1), inputs(64, 256, torch.bfloat16)
    io = request(made, x, [Item(0, list(range(64)))])
    weight = inputs(256, 256, torch.bfloat16, seed=5)
    lib().start(1)
    first, theirs = answer(made, io, AMX), x @ weight
    for _ in range(3):
        assert torch.equal(answer(made, io, AMX), first) and torch.equal(x @ weight, theirs)
