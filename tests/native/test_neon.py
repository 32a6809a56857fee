"""The tier `neon`, cross-compiled and run by an emulator: within the bounds of float64, for every format.

No hardware has run it, so it is taken on demand only. That library's `scalar` has the bits of this one's.
"""

from __future__ import annotations

import pytest
import torch

from freetoken.core.weights import CodedWeight
from freetoken.experts.abi import DTYPES
from freetoken.native import ops
from tests.native.build import (
    CODED,
    FORMATS,
    Item,
    answer,
    every_code,
    hidden_unit,
    inputs,
    lib,
    one,
    product,
    reference,
    request,
    within,
)
from tests.native.elsewhere import call, experts
from tests.native.test_formats import ACTIVATIONS

pytestmark = pytest.mark.timeout(1800)  # the first run compiles
TIERS = ("neon", "scalar")


def test_neon_is_there_on_demand_and_scalar_is_the_automatic_choice(arm):
    assert arm.run().split() == ["neon", "scalar"]


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_experts_of_one_row_and_of_five_are_within_their_bounds_on_any_threads(arm, fmt):
    unit, tile = hidden_unit(fmt), max(FORMATS[fmt].block, 8)
    hidden = unit * (1 + 288 // unit)
    made = one(fmt, hidden, 2 * tile, tile, 2)
    items = [Item(0, [0]), Item(1, [4, 3, 2, 1, 0]), Item(1, [2], 1)]
    xs = [inputs(5, hidden, dtype) for dtype in DTYPES]
    asked = [experts(made, request(made, x, items)) for x in xs]
    for tier in TIERS:
        for x, (out,) in zip(xs, arm.answers(tier, asked), strict=True):
            within(out, *reference(made, x, items))
            if tier == "scalar":
                assert torch.equal(out, answer(made, request(made, x, items), tier))


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_every_bit_pattern_of_a_code_is_read_right(arm, fmt):
    made, x, items = every_code(fmt), inputs(5, 256, torch.float32), [Item(0, [0, 1, 2, 3, 4])]
    ((out,),) = arm.answers("neon", [experts(made, request(made, x, items))])
    within(out, *reference(made, x, items))


@pytest.mark.parametrize("fmt", [*DTYPES, *CODED], ids=str)
def test_dense_products_are_within_their_bounds_on_any_threads(arm, fmt):
    if isinstance(fmt, str):
        k, dtypes = hidden_unit(fmt) * (1 + 288 // hidden_unit(fmt)), list(DTYPES)
        packed = torch.empty(CODED[fmt].matrix_bytes(19, k), dtype=torch.uint8)
        CODED[fmt].pack_matrix(CODED[fmt].encode(inputs(19, k, torch.float32, seed=1)), packed)
        w = CodedWeight(CODED[fmt], packed, (19, k)).decode(torch.arange(19))
    else:
        k, dtypes = 301, [fmt]
        w = packed = inputs(19, k, fmt, seed=1)
    cases, asked = [], []
    for dtype in dtypes:
        for rows in (1, 5):
            x, bias, y = (
                inputs(rows, k, dtype),
                inputs(1, 19, dtype, seed=2)[0],
                torch.zeros(rows, 19, dtype=dtype),
            )
            at = [t.data_ptr() for t in (x, packed, bias, y)]
            if isinstance(fmt, str):
                job = ops.CodedProduct(*at, rows, 19, k, lib().format_index(fmt), DTYPES[dtype])
            else:
                job = ops.Product(at[0], 0, at[1], at[2], 0, at[3], rows, 19, k, 0.0, DTYPES[dtype])
            cases.append((x, w, bias))
            asked.append(call(job, x, packed, bias, y))
    for tier in TIERS:
        for case, (*_, y) in zip(cases, arm.answers(tier, asked), strict=True):
            within(y, *product(*case))


def test_int8_activations_have_the_bits_of_scalar_here(arm):
    for fmt in (name for name in FORMATS if lib().has_int8(name)):
        made, x, items = (
            one(fmt, 256, 256, 256),
            inputs(5, 256, torch.bfloat16),
            [Item(0, [0]), Item(1, [1, 2, 3, 4])],
        )
        index = lib().format_index(fmt, int8=True)
        want = answer(made, request(made, x, items), "scalar", format=index)
        ((out,),) = arm.answers("neon", [experts(made, request(made, x, items), int8=True)])
        assert torch.equal(out, want), fmt


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_activations_are_within_their_bounds(arm, scale):
    made, x, items = one("f32", 96, 64), inputs(9, 96, torch.float32) * scale, [Item(0, list(range(9)))]
    asked = [experts(made, request(made, x, items), **layer) for layer, _ in ACTIVATIONS.values()]
    for (_, act), (out,) in zip(ACTIVATIONS.values(), arm.answers("neon", asked), strict=True):
        want, bound = reference(made, x, items, act)
        within(out, want, 2 * bound)


def test_extreme_gates_neither_overflow_nor_hide_a_nan(arm):
    made, x = one("f32", 32, 32, 32, 1), torch.full((4, 32), 1e18)
    x[1] = -1e18
    x[2], x[3] = 0.0, float("nan")
    ((out,),) = arm.answers("neon", [experts(made, request(made, x, [Item(0, [0, 1, 2, 3])]), limit=7.0)])
    assert bool(torch.isfinite(out[:3]).all()) and bool(out[3].isnan().all())
