"""Every (format, tier, input type) against float64, over odd shapes, batches and runs of tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.native.library import library
from tests.native.build import (
    EPS,
    FORMATS,
    Item,
    answer,
    every_code,
    hidden_unit,
    inputs,
    lib,
    one,
    reference,
    request,
    within,
)

TIERS = library().tiers if library() else ()
OWN_TIERS = [tier for tier in TIERS if tier != "avx2_vnni"]
"""It adds byte products to avx2, whose code all else is."""
DTYPES = tuple(EPS)


def tiles(fmt: str) -> list[int]:
    return [w for w in (8, 16, 32, 64, 128, 256) if w % max(FORMATS[fmt].block, 8) == 0]


def test_the_library_and_the_formats_agree_on_every_tile_size():
    for name, form in FORMATS.items():
        for hidden in range(hidden_unit(name), 700, hidden_unit(name)):
            for width in tiles(name):
                assert lib().tile_bytes(name, width, hidden) == form.tile_bytes(width, hidden), (name, hidden)
    assert set(lib().formats) == set(FORMATS)
    assert lib().tile_bytes("mxfp4", 32, 40) == lib().tile_bytes("nothing", 32, 32) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tier", OWN_TIERS)
@pytest.mark.parametrize("fmt", list(FORMATS))
@settings(max_examples=3)
@given(data=st.data())
def test_an_expert_is_within_its_bound_of_float64(fmt, tier, dtype, data):
    check_an_expert(fmt, tier, dtype, data)


LARGE = [fmt for fmt in FORMATS if FORMATS[fmt].block == 256]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("fmt", LARGE)
def test_large_tiles_are_computed_in_pieces_within_their_bound_on_any_threads(fmt, biased):
    """Half a MiB of a tile and more is cut at multiples of 64 columns, while few rows share it."""
    made = one(fmt, 2304, 512, 256, 2, biased=biased)
    assert made.bank.layouts[0].tile_bytes > 512 << 10
    for dtype, rows in ((torch.bfloat16, [0]), (torch.bfloat16, [2, 0, 1]), (torch.float16, [1, 0])):
        x, items = inputs(3, 2304, dtype), [Item(0, rows), Item(1, rows[:1])]
        want, bound = reference(made, x, items)
        for tier in OWN_TIERS:
            lib().start(1)
            alone = answer(made, request(made, x, items), tier)
            within(alone, want, 2 * bound)
            lib().start(3)
            assert torch.equal(answer(made, request(made, x, items), tier), alone), tier
    lib().start(2)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fmt", list(FORMATS))
@settings(max_examples=60)
@given(data=st.data())
def test_many_experts_are_within_their_bounds_of_float64(fmt, tier, dtype, data):
    check_an_expert(fmt, tier, dtype, data)


def check_an_expert(fmt, tier, dtype, data):
    hidden = hidden_unit(fmt) * data.draw(st.integers(1, 320 // hidden_unit(fmt) or 1), "hidden")
    tile = data.draw(st.sampled_from(tiles(fmt)), "tile")
    count = data.draw(st.integers(1, 4 if tile < 128 else 2), "tiles")
    made = one(fmt, hidden, tile * count, tile, 2, seed=hidden + count)
    tokens = data.draw(st.integers(1, 40), "tokens")
    x = inputs(tokens, hidden, dtype, seed=tokens)
    if data.draw(st.booleans(), "zeros"):
        x[0] = 0
    picks = st.lists(st.integers(0, tokens - 1), min_size=1, max_size=data.draw(st.sampled_from([1, 7, 70])))
    items = [Item(0, data.draw(picks)), Item(1, data.draw(picks), data.draw(st.integers(0, count - 1)))]
    want, bound = reference(made, x, items)
    within(answer(made, request(made, x, items), tier), want, bound)


@pytest.mark.parametrize("tier", OWN_TIERS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_every_bit_pattern_of_a_code_is_read_right(fmt, tier):
    made = every_code(fmt)
    x = inputs(5, 256, torch.bfloat16)
    items = [Item(0, [0, 1, 2, 3, 4])]
    want, bound = reference(made, x, items)
    within(answer(made, request(made, x, items), tier), want, bound)


@pytest.mark.parametrize("tier", OWN_TIERS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(fmt, tier):
    made = one(fmt, 256, 256, 256, 1)  # one chunk, so that only the rows' grouping differs
    x = inputs(13, 256, torch.bfloat16)
    whole = answer(made, request(made, x, [Item(0, list(range(13)))]), tier)
    for row in range(13):
        assert torch.equal(answer(made, request(made, x, [Item(0, [row])]), tier)[0], whole[row])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fmt", ["f32", "bf16", "q4_k"])
def test_biases_are_added_once_whoever_computes_which_tiles(fmt, tier):
    made, x = one(fmt, 512, 512, 256, biased=True), inputs(7, 512, torch.bfloat16)
    items = [Item(0, [0]), Item(1, list(range(7))), Item(2, [2, 4], 1)]
    want, bound = reference(made, x, items)
    within(answer(made, request(made, x, items), tier), want, 2 * bound)


@pytest.mark.parametrize("tier", TIERS)
def test_padding_rows_give_zeros(tier):
    made, x = one("bf16", 40, 64), inputs(3, 40, torch.bfloat16)
    out = answer(made, request(made, x, [Item(1, [0, -1, 2, -1, -1])]), tier)
    assert bool((out[[1, 3, 4]] == 0).all()) and bool((out[[0, 2]] != 0).any())


def clamped(g, u):
    g, u = g.clamp(max=0.7), u.clamp(-0.7, 0.7)
    return g * torch.sigmoid(1.702 * g) * (u + 1)


ACTIVATIONS = {
    "gelu": ({"activation": 1}, lambda g, u: torch.nn.functional.gelu(g) * u),
    "gelu_tanh": ({"activation": 2}, lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u),
    "relu": ({"activation": 3}, lambda g, u: g.clamp(min=0) * u),
    "clamped swiglu": ({"alpha": 1.702, "limit": 0.7, "up_offset": 1.0}, clamped),
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_activations_are_within_their_bounds(tier, name, scale):
    layer, act = ACTIVATIONS[name]
    made, x = one("f32", 96, 64), inputs(9, 96, torch.float32) * scale
    items = [Item(0, list(range(9)))]
    want, bound = reference(made, x, items, act)
    within(answer(made, request(made, x, items), tier, **layer), want, 2 * bound)


@pytest.mark.parametrize("tier", TIERS)
def test_extreme_gates_neither_overflow_nor_hide_a_nan(tier):
    made = one("f32", 32, 32, 32, 1)
    x = torch.full((4, 32), 1e18)
    x[1] = -1e18
    x[2], x[3] = 0.0, float("nan")
    out = answer(made, request(made, x, [Item(0, [0, 1, 2, 3])]), tier, limit=7.0)
    assert bool(torch.isfinite(out[:3]).all()) and bool(out[3].isnan().all())
