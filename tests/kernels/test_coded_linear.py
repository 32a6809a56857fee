"""Dense products from codes: what decoding first gives, for every format, any rows and every maker."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core import choices
from freetoken.core.weights import CodedWeight
from freetoken.kernels.coded_linear import MAKERS, coded_linear, native
from freetoken.layers.embedding import Embedding
from freetoken.layers.linear import CodedLinear, Linear, Stacked, placed, stack
from freetoken.quant import _reading as reading
from freetoken.quant._coded import CodedFormat

FORMATS = [f for n in choices.names("freetoken.quant") if isinstance(f := reading.find(n), CodedFormat)]
Q8_0 = next(f for f in FORMATS if f.name == "q8_0")
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def weight_of(fmt: CodedFormat, rows: int, columns: int, seed: int = 0, order: bool = False) -> CodedWeight:
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=draw)
    packed = torch.empty(fmt.matrix_bytes(rows, columns), dtype=torch.uint8)
    fmt.pack_matrix(fmt.encode(matrix), packed)
    return CodedWeight(
        fmt, packed, (rows, columns), torch.randperm(columns, generator=draw) if order else None
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_rows_of_a_packed_matrix_are_what_its_codes_decode_to(fmt: CodedFormat) -> None:
    rows, columns = 130, 256
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    want = fmt.decode(fmt.encode(matrix))
    packed = torch.empty(fmt.matrix_bytes(rows, columns), dtype=torch.uint8)
    fmt.pack_matrix(fmt.encode(matrix), packed)
    ids = torch.tensor([129, 0, 5, 5, 64])
    assert torch.equal(fmt.matrix_rows(packed, (rows, columns), ids), want[ids])
    table = Embedding(CodedWeight(fmt, packed, (rows, columns)), torch.bfloat16)
    assert torch.equal(table(ids), want[ids].to(torch.bfloat16))
    for maker in MAKERS:
        if maker.supports("cpu"):
            assert torch.equal(maker.every_number(CodedWeight(fmt, packed, (rows, columns))), want)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 2, 7, 40]),
    outputs=st.sampled_from([1, 64, 129]),
    wide=st.integers(1, 3),
    dtype=st.sampled_from(list(BOUND)),
    extras=st.booleans(),
)
def test_a_product_from_codes_is_the_product_of_the_decoded_matrix(
    maker: object, fmt: CodedFormat, rows: int, outputs: int, wide: int, dtype: torch.dtype, extras: bool
) -> None:
    columns = max(fmt.columns_multiple, 32) * wide
    weight = weight_of(fmt, outputs, columns, seed=rows, order=extras)
    if maker is native and not (native.supports("cpu") and native.takes(fmt, weight.shape)):
        pytest.skip("the library doesn't multiply with this format")
    draw = torch.Generator().manual_seed(outputs)
    x = torch.randn(rows, columns, generator=draw).to(dtype)
    bias = torch.randn(outputs, generator=draw).to(dtype) if extras else None
    numbers = weight.decode(torch.arange(outputs)).double()
    given = x.double() if weight.columns is None else x.double()[:, weight.columns]
    want = given @ numbers.t() + (0 if bias is None else bias.double())
    got = maker.coded_linear(x, weight, bias)  # type: ignore[attr-defined]
    assert got.dtype == dtype and got.shape == want.shape
    scale = float((given.abs() @ numbers.abs().t()).max()) + 1e-9
    assert float((got.double() - want).abs().max()) / scale < BOUND[dtype]


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    for fmt in FORMATS:
        weight = weight_of(fmt, 96, 256)
        x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        if not (native.supports("cpu") and native.takes(fmt, weight.shape)):
            continue
        whole = coded_linear(x, weight)
        assert all(torch.equal(coded_linear(x[i : i + 1], weight)[0], whole[i]) for i in range(9)), fmt.name


def test_plain_and_coded_projections_stand_side_by_side() -> None:
    q8, q4 = reading.find("q8_0"), reading.find("q4_0")
    assert isinstance(q8, CodedFormat) and isinstance(q4, CodedFormat)
    weights = [weight_of(q8, 8, 32, 1), torch.randn(3, 32), weight_of(q4, 5, 32, 2)]
    biases = [torch.randn(8), None, torch.randn(5)]
    both = stack(weights, biases)
    assert isinstance(both, Stacked) and both.shape == (16, 32)
    assert [type(p) for p in both.parts] == [CodedLinear, Linear, CodedLinear]
    x = torch.randn(4, 32)
    numbers = [w if isinstance(w, torch.Tensor) else w.decode(torch.arange(w.shape[0])) for w in weights]
    whole = torch.cat([b if b is not None else torch.zeros(3) for b in biases])
    want = x @ torch.cat(numbers).t() + whole
    assert torch.allclose(both(x), want, atol=1e-5)
    assert torch.allclose(both.add_to(torch.ones(4, 16), x), want + 1, atol=1e-5)
    assert isinstance(stack([torch.randn(3, 32)], [None]), Linear)


@pytest.mark.skipif(not native.supports("cpu"), reason="no native library")
def test_codes_of_a_large_matrix_lie_on_whole_huge_pages_once() -> None:
    weight = weight_of(Q8_0, 2048, 1152)
    once = placed(weight)
    assert isinstance(once, CodedWeight) and torch.equal(once.packed, weight.packed)
    assert once.packed.data_ptr() % (2 << 20) == 0 != weight.packed.data_ptr() % (2 << 20)
    assert CodedLinear(once).weight.packed.data_ptr() == once.packed.data_ptr(), (
        "what is placed is not copied"
    )
    small = weight_of(Q8_0, 8, 1152)
    assert CodedLinear(small).weight.packed.data_ptr() == small.packed.data_ptr()
