"""Every GGUF type against the package that defines it: numbers to the last bit, bytes and records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.weights import WeightFormat
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout
from freetoken.quant._gguf import GgufFormat

gguf = pytest.importorskip("gguf")
FORMATS = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
TYPES = [fmt for fmt in FORMATS if fmt.gguf_type >= 0]
BLOCKS = [fmt for fmt in TYPES if isinstance(fmt, GgufFormat)]


def rows_of(fmt: WeightFormat, rows: int, blocks: int, seed: int = 0) -> Tensor:
    """Random bytes, every code and scale among them."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, blocks * fmt.gguf_bytes), dtype=torch.uint8, generator=draw)


def finite(fmt: GgufFormat, raw: Tensor) -> Tensor:
    """The same with tame scales where a number would not be finite."""
    coded = dict(fmt.from_gguf(raw))
    for part in fmt.parts:
        values = coded[part.name]
        if part.dtype.is_floating_point:
            coded[part.name] = torch.where(values.isfinite() & (values.abs() < 100), values, 0.25)
        elif part.dtype == torch.uint8:
            coded[part.name] = values % 255
    return fmt.to_gguf(coded)


@pytest.mark.parametrize("fmt", TYPES, ids=lambda f: f.name)
def test_numbers_are_those_of_the_gguf_package_to_the_last_bit(fmt: WeightFormat) -> None:
    kind = gguf.GGMLQuantizationType(fmt.gguf_type)
    assert kind.name.lower() == fmt.name
    assert gguf.GGML_QUANT_SIZES[kind] == (fmt.gguf_columns, fmt.gguf_bytes)
    raw = rows_of(fmt, 48, 64 if fmt.gguf_columns == 1 else 8)
    if fmt.name == "mxfp4":  # 255 is no number in the format, which GGUF doesn't know
        raw[:, :: fmt.gguf_bytes] %= 255
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
    got = fmt.dequantise(raw)
    assert got.shape == want.shape and bool(want.isfinite().any())
    assert bool(((got == want) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_blocks_come_back_byte_by_byte(fmt: GgufFormat) -> None:
    raw = rows_of(fmt, 7, 3)
    assert torch.equal(fmt.to_gguf(fmt.from_gguf(raw)), raw)
    stack = rows_of(fmt, 6, 2).unflatten(0, (2, 3))
    assert torch.equal(fmt.to_gguf(fmt.from_gguf(stack)), stack)


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_an_expert_of_blocks_lies_in_its_record_and_nothing_is_lost(fmt: GgufFormat) -> None:
    h = i = 256
    raw = [finite(fmt, rows_of(fmt, 256, 256 // fmt.gguf_columns, seed)) for seed in range(3)]
    one = layout(h, i, fmt)
    bank = ExpertBank([one], [fmt], 1)
    gate, up, down = (fmt.from_gguf(r) for r in raw)
    bank.put_coded(0, 0, (gate, up, down))
    tiles = bank.record(0)[one.tiles_offset : one.used_bytes].view(one.num_tiles, one.tile_bytes)
    parts = fmt.tile_weights(tiles[:, : one.code_bytes], one.tile_width, h)
    for got, blocks in zip((parts[0], parts[1], parts[2].reshape(i, h).t()), raw, strict=True):
        assert torch.equal(got.reshape(256, 256), fmt.dequantise(blocks))
    most = 1.2 * sum(r.numel() for r in raw) / one.num_tiles + 16 * 64
    assert one.code_bytes <= most, "a record is about as large as its blocks"


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_a_row_that_cuts_a_block_is_refused(fmt: GgufFormat) -> None:
    with pytest.raises(WeightsError, match=f"no row of {fmt.name} blocks"):
        fmt.from_gguf(rows_of(fmt, 2, 2)[:, :-1])


def test_every_type_number_names_one_format() -> None:
    assert len({fmt.gguf_type for fmt in TYPES}) == len(TYPES)
