"""Every GGUF type against the package that defines it: numbers to the last bit, bytes and records."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.weights import WeightFormat
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout
from freetoken.quant._gguf import GgufFormat
from tests.quant.specimens import drawn, gguf_rows

gguf = pytest.importorskip("gguf")
FORMATS = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
TYPES = [fmt for fmt in FORMATS if fmt.gguf_type >= 0]
BLOCKS = [fmt for fmt in TYPES if isinstance(fmt, GgufFormat)]


@pytest.mark.parametrize("fmt", TYPES, ids=lambda f: f.name)
def test_numbers_are_those_of_the_gguf_package_to_the_last_bit(fmt: WeightFormat) -> None:
    kind = gguf.GGMLQuantizationType(fmt.gguf_type)
    assert kind.name.lower() == fmt.name
    assert gguf.GGML_QUANT_SIZES[kind] == (fmt.gguf_columns, fmt.gguf_bytes)
    raw = gguf_rows(fmt, 48, 64 if fmt.gguf_columns == 1 else 8)
    if fmt.name == "mxfp4":  # 255 is no number in the format, which GGUF doesn't know
        raw[:, :: fmt.gguf_bytes] %= 255
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
    got = fmt.dequantise(raw)
    assert got.shape == want.shape and bool(want.isfinite().any())
    assert bool(((got == want) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_blocks_come_back_byte_by_byte(fmt: GgufFormat) -> None:
    raw = gguf_rows(fmt, 7, 3)
    assert torch.equal(fmt.to_gguf(fmt.from_gguf(raw)), raw)
    stack = gguf_rows(fmt, 6, 2).unflatten(0, (2, 3))
    assert torch.equal(fmt.to_gguf(fmt.from_gguf(stack)), stack)


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_an_expert_of_blocks_lies_in_its_record_and_nothing_is_lost(fmt: GgufFormat) -> None:
    h, i = 512, 256
    shapes = ((i, h), (i, h), (h, i))
    raw = [fmt.to_gguf(drawn(fmt, *shape, seed)) for seed, shape in enumerate(shapes)]
    one = layout(h, i, fmt)
    bank = ExpertBank([one], [fmt], 1)
    gate, up, down = (fmt.from_gguf(r) for r in raw)
    bank.put_coded(0, 0, (gate, up, down))
    tiles = bank.record(0)[one.tiles_offset : one.used_bytes].view(one.num_tiles, one.tile_bytes)
    parts = fmt.tile_weights(tiles[:, : one.code_bytes], one.tile_width, h)
    gate_up_down = parts[0].reshape(i, h), parts[1].reshape(i, h), parts[2].reshape(i, h).t()
    for got, blocks in zip(gate_up_down, raw, strict=True):
        assert torch.equal(got, fmt.dequantise(blocks))
    most = 1.1 * sum(r.numel() for r in raw) / one.num_tiles + 16 * 64
    assert one.code_bytes <= most, "a record is about as large as its blocks"


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_a_row_that_cuts_a_block_is_refused(fmt: GgufFormat) -> None:
    with pytest.raises(WeightsError, match=f"no row of {fmt.name} blocks"):
        fmt.from_gguf(gguf_rows(fmt, 2, 2)[:, :-1])


def test_every_type_number_names_one_format() -> None:
    assert len({fmt.gguf_type for fmt in TYPES}) == len(TYPES)
