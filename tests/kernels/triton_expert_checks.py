"""Grouped experts by Triton against their reference: routes, spans, tiles, biases. Run by test_triton.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.codes import Coded
from freetoken.core.model_config import Activation
from freetoken.kernels.expand_records import reference as expand_reference
from freetoken.kernels.expand_records import triton as expand
from freetoken.kernels.grouped_mlp import Form
from freetoken.kernels.grouped_mlp import reference as grouped_reference
from freetoken.kernels.grouped_mlp import triton as grouped
from freetoken.quant._mixed import MixedFormat

from .triton_checks import DTYPES, INTERPRETED, PLACE, ROUND, big, close, pytestmark, rand

__all__ = ["pytestmark"]


def routing(rows: int, experts: int, top_k: int) -> Tensor:
    """Ascending ids; some rows are dead, one expert is nobody's, one is everybody's."""
    score = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
    score[:, 0], score[:, min(2, experts - 1)] = -1.0, 2.0
    ids = score.topk(top_k, dim=1).indices.sort(1).values.int()
    ids[1::7] = -1
    return ids


@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 4, 1), (40, 6, 3), *big((3000, 128, 8), (700, 512, 10))]
)
def test_routes_are_sorted(rows: int, experts: int, top_k: int) -> None:
    ids = routing(rows, experts, top_k)
    ours = grouped.sort_routes(ids.to(PLACE), experts)
    first, order, place, owner = (t.cpu().tolist() for t in (ours.first, ours.order, ours.place, ours.owner))
    flat = ids.flatten()
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten().tolist()
        blocks = range(first[expert], first[expert + 1])
        assert len(blocks) == -(-len(mine) // ours.block) and all(owner[b] == expert for b in blocks)
        start, stop = first[expert] * ours.block, first[expert + 1] * ours.block
        assert order[start:stop] == mine + [-1] * (stop - start - len(mine))
        assert [place[route] for route in mine] == list(range(start, start + len(mine)))


FORMS = [  # H, I, tile width, activation, biased
    (32, 24, 8, Activation(), False),
    (40, 32, 16, Activation("silu", 1.702, 0.5, 1.0), True),
    (16, 16, 16, Activation("gelu"), False),
    (16, 16, 8, Activation("gelu_pytorch_tanh"), False),
    (16, 8, 8, Activation("relu"), False),
    *big(
        (2048, 768, 32, Activation(), False),
        (2880, 2880, 64, Activation("silu", 1.702, 7.0, 1.0), True),
        (2048, 512, 32, Activation(), False),
    ),
]


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "rows"),
    [(FORMS[0], 37), (FORMS[1], 37), *((form, 19) for form in FORMS[2:]), (FORMS[0], 1), (FORMS[1], 1)]
    + big(*product(FORMS, (1, 37, 600, 3000))),
)
def test_grouped_experts(case: tuple[int, int, int, Activation, bool], rows: int, dtype: torch.dtype) -> None:
    hidden, size, width, act, biased = case
    experts, top_k = (5, 2) if INTERPRETED else (32, 4)
    code = 3 * width * hidden * 2
    bias_at = up(code, 64) if biased else 0
    tile = up(bias_at + 8 * width if biased else code, 128)
    form = Form(hidden, size, width, tile, up(4 * hidden, 256) if biased else 0, bias_at, act)
    tiles = size // width
    records = torch.zeros(experts, up(form.tiles_offset + tiles * tile, 4096), dtype=torch.uint8)
    each = records[:, form.tiles_offset : form.tiles_offset + tiles * tile].unflatten(1, (tiles, tile))
    weights = rand(experts, tiles, 3, width, hidden) * (3.0 / hidden) ** 0.5
    each[..., :code] = weights.cpu().to(dtype).view(experts, tiles, -1).view(torch.uint8)
    if biased:
        bias = rand(experts, tiles, 2 * width).cpu().view(torch.uint8)
        each[..., bias_at : bias_at + 8 * width] = bias
        records[:, : 4 * hidden] = rand(experts, hidden, seed=1).cpu().view(torch.uint8)
    ids = routing(rows, experts, top_k)
    x, share = rand(rows, hidden, dtype=dtype), rand(rows, top_k).abs()
    want = torch.zeros(rows, hidden)
    here = records.data_ptr() + torch.arange(experts) * records.shape[1]
    routes = grouped_reference.sort_routes(ids, experts)
    grouped_reference.grouped_mlp(x.cpu(), routes, share.cpu(), here, form, (0, experts), want)

    there = records.to(PLACE)
    address = (there.data_ptr() + torch.arange(experts) * records.shape[1]).to(PLACE)
    ours, pieces = (torch.zeros(rows, hidden, device=PLACE) for _ in range(2))
    routes = grouped.sort_routes(ids.to(PLACE), experts)
    grouped.grouped_mlp(x, routes, share, address, form, (0, experts), ours)
    close(ours.cpu(), want, 2 * ROUND[dtype])
    for span in ((0, 1), (1, 4), (4, experts)):
        grouped.grouped_mlp(x, routes, share, address, form, span, pieces)
    assert torch.equal(ours, pieces), "the same bits however the experts are cut into spans"
    assert not ours[1::7].any(), "dead rows stay as they are"


def coded_formats() -> list:
    formats = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
    by_name = {fmt.name: fmt for fmt in formats if fmt.device_code(fmt.block, 512)}
    return [*by_name.values(), MixedFormat([by_name["q4_k"], by_name["q4_k"], by_name["q6_k"]])]


DEFAULT = ("mxfp4", "fp8_block", "q5_1", "q8_0", "int4_zp_g32", "iq4_nl", "q6_k")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, id=fmt.name, marks=() if fmt.name in DEFAULT else pytest.mark.soak)
        for fmt in coded_formats()
    ],
)
def test_coded_records_expand_to_what_their_format_decodes(fmt, dtype: torch.dtype) -> None:
    hidden, tiles, experts = (256, 1, 1) if INTERPRETED else (2048, 3, 5)
    biased = fmt.name in ("mxfp4", "q8_0")
    if biased:
        tiles, experts = 2, 2
    w = up(16, fmt.block)
    bias_at = up(fmt.tile_bytes(w, hidden), 64) if biased else 0
    tile = up(bias_at + 8 * w if biased else fmt.tile_bytes(w, hidden), 128)
    start = up(4 * hidden, 256) if biased else 0
    coded = Coded(hidden, w, tiles, tile, start, fmt.device_code(w, hidden), bias_at)
    records = torch.zeros(experts, up(start + tiles * tile, 4096), dtype=torch.uint8)
    want = torch.empty(experts, tiles, 3, w, hidden, dtype=dtype)
    biases, lasts = rand(experts, tiles, 2 * w).cpu(), rand(experts, hidden).cpu()
    for e in range(experts):
        for t in range(tiles):
            at = records[e, start + t * tile :][:tile]
            parts = (rand(w, hidden, seed=9 * e + 3 * t + m).cpu() * 0.1 for m in range(3))
            code = at[: fmt.tile_bytes(w, hidden)]
            fmt.pack_tile(*parts, code)
            want[e, t] = torch.stack(fmt.tile_weights(code, w, hidden)).to(dtype)
            if biased:
                at[bias_at : bias_at + 8 * w] = biases[e, t].view(torch.uint8)
    if biased:
        records[:, : 4 * hidden] = lasts.view(torch.uint8)
    size, to_tile, to_start, to_bias = coded.plain_bytes()
    for maker, place in ((expand_reference, "cpu"), (expand, PLACE)):
        there = records.to(place)
        address = (there.data_ptr() + torch.arange(experts) * records.shape[1]).to(place)
        out = torch.zeros(experts, up(size, 128), dtype=torch.uint8, device=place)
        maker.expand_records(address, coded, out, dtype)
        each = out.cpu()[:, to_start : to_start + tiles * to_tile].unflatten(1, (tiles, to_tile))
        ours = each[..., : 6 * w * hidden].contiguous().view(dtype).view(want.shape)
        close(ours, want, ROUND[dtype] if maker is expand else 1e-12)
        if biased:
            assert torch.equal(each[..., to_bias : to_bias + 8 * w].contiguous().view(torch.float32), biases)
            assert torch.equal(out.cpu()[:, : 4 * hidden].contiguous().view(torch.float32), lasts)
