"""Dense products by the library: within bounds of float64, the same bits alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.kernels.linear import linear, native, reference
from freetoken.native.library import library
from tests.native.build import lib, product, within

CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def drawn(*shape: int, dtype=torch.bfloat16, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
@pytest.mark.parametrize("tier", library().tiers if library() else ())
@settings(max_examples=12)
@given(rows=st.integers(1, 20), n=st.integers(1, 70), k=st.integers(1, 300), biased=st.booleans())
def test_a_product_is_within_its_bound_of_float64(tier, dtype, rows, n, k, biased):
    x, w = drawn(rows, k, dtype=dtype), drawn(n, k, dtype=dtype, seed=1)
    bias = drawn(n, dtype=dtype, seed=2) if biased else None
    y = torch.full((rows, n), float("nan"), dtype=dtype)
    code, tiers = CODES[dtype], lib().tiers
    given = 0 if bias is None else bias.data_ptr()
    at = (x.data_ptr(), 0, 0.0, w.data_ptr(), given, 0, y.data_ptr(), rows, n, k)
    assert lib()._lib.ft_linear(tiers.index(tier), code, *at) == 0
    within(y, *product(x, w, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_batch_on_any_threads(dtype):
    x, w = drawn(16, 520, dtype=dtype), drawn(333, 520, dtype=dtype)
    lib().start(1)
    whole = native.linear(x, w, None)
    for threads in (2, 3):
        lib().start(threads)
        assert torch.equal(native.linear(x, w, None), whole)
    for row in (0, 7, 15):
        assert torch.equal(native.linear(x[row], w, None), whole[row])
    lib().start(2)


def test_large_weights_move_to_pages_of_their_own_and_stay_what_they_are():
    w = drawn(2100, 1024)
    placed = native.place(w)
    assert torch.equal(placed, w) and placed.data_ptr() % (2 << 20) == 0 and placed.is_contiguous()
    small = drawn(16, 16)
    assert native.place(small) is small


def test_few_rows_go_to_the_library_and_the_rest_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(native, "call", lambda *a, **_: calls.append(a) or reference.linear(*a[1:4]))
    w = drawn(256, 256)
    assert linear(drawn(2, 8, 256), w).shape == (2, 8, 256) and len(calls) == 1
    linear(drawn(17, 256), w)
    linear(drawn(0, 256), w)
    linear(drawn(1, 256, dtype=torch.float32), w.float())
    linear(drawn(1, 256), drawn(256, 512)[:, ::2])
    linear(drawn(1, 16), drawn(16, 16))
    assert len(calls) == 1
    linear(drawn(256, 4)[:, 1], w, drawn(256))
    assert len(calls) == 2
