"""What loading does with bytes: checksums as zlib's, transposing and cutting into tiles as torch's."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core import choices
from freetoken.experts.record import layout
from tests.native.build import lib


@settings(max_examples=80, database=None, derandomize=True)
@given(size=st.integers(0, 3000), start=st.integers(0, 70), first=st.integers(0, 2**32 - 1))
def test_checksums_continue_like_zlibs(size: int, start: int, first: int) -> None:
    data = torch.randint(0, 256, (start + size,), dtype=torch.uint8)[start:]
    assert lib().crc32(data.data_ptr(), size, first) == zlib.crc32(data.numpy().tobytes(), first)


@settings(max_examples=60, database=None, derandomize=True)
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 90),
    pad=st.integers(0, 5),
    item=st.sampled_from([1, 2, 4]),
)
def test_transposing_is_exact_for_every_shape(rows: int, columns: int, pad: int, item: int) -> None:
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
    source = torch.randint(-128, 127, (rows, columns + pad)).to(dtype)
    out = torch.full((columns, rows + pad), 77, dtype=dtype)
    steps = ((columns + pad) * item, (rows + pad) * item)
    lib().transpose(item, source.data_ptr(), out.data_ptr(), (rows, columns), steps)
    assert torch.equal(out[:, :rows], source[:, :columns].t())
    assert bool((out[:, rows:] == 77).all())


@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("hidden", "size"), [(64, 32), (96, 40), (256, 128)])
def test_native_tiles_are_those_of_torch(name: str, hidden: int, size: int) -> None:
    fmt = choices.load("freetoken.quant", name).FORMAT
    one = layout(hidden, size, fmt)
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    gate, up, down = (torch.randn(shape).to(fmt.dtype) for shape in shapes)
    records = torch.zeros(2, one.record_bytes, dtype=torch.uint8)
    fmt.pack_tiles(gate, up, down.t(), one.tile_width, one.tiles(records[0]))
    for tile, out in enumerate(one.tiles(records[1])):
        cut = slice(tile * one.tile_width, (tile + 1) * one.tile_width)
        fmt.pack_tile(gate[cut], up[cut], down.t()[cut], out[: one.code_bytes])
    assert torch.equal(records[0], records[1])
