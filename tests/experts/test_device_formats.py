"""Experts in codes, biased and clamped, where kernels decide residency: the same answers as elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freetoken.core import choices
from freetoken.core.interfaces import Numerics
from freetoken.core.model_config import Activation
from freetoken.core.weights import WeightFormat
from freetoken.devices.cpu import CpuDevice
from freetoken.experts.bank import ExpertBank
from freetoken.experts.gpu_support import can_compute_here, expanded_bytes
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.split import BUCKETS
from freetoken.native.library import library

from . import build
from .test_device import backend, inputs, steps


def find(name: str) -> WeightFormat:
    fmt: WeightFormat = choices.load("freetoken.quant", name).FORMAT
    return fmt


def coded(name: str) -> build.Tiny:
    """Two layers of biased, clamped experts as gpt-oss has them, in some format."""
    model = build.config(hidden=32, width=64)
    clamped = Activation("silu", 1.702, 7.0, 1.0)
    return build.tiny(replace(model, moe=replace(model.moe, bias=True, activation=clamped)), fmt=find(name))


def by_torch(tiny: build.Tiny, rows: int) -> list[torch.Tensor]:
    """The plain answer, as the CPU computes it without kernels of a device."""
    setup = ExpertSetup(tiny.config, tiny.bank, CpuDevice(), Numerics(), native=False)
    made = choices.load("freetoken.experts.backends", "fused").create(setup)
    return steps(made, tiny, rows)


@pytest.mark.parametrize("name", ["mxfp4", "q8_0", "f32"])
@pytest.mark.parametrize("rows", [1, 5])
def test_coded_and_biased_experts_decode_to_the_plain_answer(name: str, rows: int) -> None:
    tiny = coded(name)
    whole = steps(backend(tiny, "fused"), tiny, rows)
    for mine, theirs in zip(steps(backend(tiny, "offload", 6), tiny, rows), whole, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(whole, by_torch(tiny, rows), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_the_host_answers_for_coded_and_biased_experts() -> None:
    tiny = coded("mxfp4")
    whole = steps(backend(tiny, "fused"), tiny, 2)
    made = backend(tiny, "hybrid", 6)
    made.table.set_splits([(0.5, 0.0)] * BUCKETS)
    try:
        for mine, theirs in zip(steps(made, tiny, 2), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        made.table.count(made.stats)
        assert made.stats.cpu_tiles and made.stats.filled_tiles
    finally:
        made.close()


def test_a_prompt_over_coded_experts_is_the_plain_answer_whatever_is_resident() -> None:
    tiny = coded("mxfp4")
    x, routing = inputs(tiny, 70, 3)
    routings = [routing] * tiny.bank.num_layers
    want = build.stream(backend(tiny, "fused"), x, routings)
    made = backend(tiny, "offload", 9)
    steps(made, tiny, 1, 2)
    assert torch.equal(build.stream(made, x, routings), want)
    setup = ExpertSetup(tiny.config, tiny.bank, CpuDevice(), Numerics(), native=False)
    plain = choices.load("freetoken.experts.backends", "fused").create(setup)
    for layer in range(tiny.bank.num_layers):
        plain.begin(layer, x, routing, None)
        torch.testing.assert_close(want[layer], plain.finish(layer), rtol=2e-2, atol=2e-2)


def test_what_devices_read_is_told_from_headers() -> None:
    moe = build.config().moe
    formats = [find(name) for name in choices.names("freetoken.quant")]
    refused = [fmt.name for fmt in formats if not can_compute_here([fmt], moe)]
    assert refused == ["iq3_s", "iq3_xxs"], "points of a grid have no meaning for devices yet"
    assert can_compute_here(
        [find("mxfp4")], replace(moe, bias=True, activation=Activation("silu", 1.7, 7.0, 1.0))
    )
    assert not can_compute_here([find("mxfp4")], replace(moe, activation=Activation("tanh")))


def test_only_coded_experts_need_a_place_to_be_expanded() -> None:
    for name, needs in (("bf16", False), ("f16", True), ("mxfp4", True)):
        bank = build.tiny(build.config(width=64), fmt=find(name)).bank
        most = expanded_bytes(bank.layouts, bank.formats, bank.num_experts, torch.bfloat16)
        assert (most >= 6 * 32 * 64 * bank.num_experts) if needs else most == 0


def test_layers_that_are_cut_differently_share_the_place_of_partial_sums() -> None:
    """A checkpoint whose second layer has more and narrower tiles, as its format asks for."""
    model = build.config(hidden=128, width=256)
    made = [build.tiny(model, fmt=find(name)).bank for name in ("int4_g128", "mxfp4")]
    assert made[0].layouts[0].num_tiles < made[1].layouts[1].num_tiles
    formats, layouts = [one.formats[0] for one in made], [one.layouts[0] for one in made]
    bank = ExpertBank(layouts, formats, model.moe.num_experts)
    for layer, source in enumerate(made):
        bank.layer(layer).copy_(source.layer(layer))
    bank.arrivals = made[0].arrivals
    tiny = build.Tiny(model, bank, {}, {})
    whole = steps(backend(tiny, "fused"), tiny, 2, 3)
    for mine, theirs in zip(steps(backend(tiny, "offload", 6), tiny, 2, 3), whole, strict=True):
        assert torch.equal(mine, theirs)
