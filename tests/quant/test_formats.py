"""Every plain weight format: what is packed comes back bit by bit, as views, from any run of tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core import choices
from freetoken.quant._plain import PlainFormat

FORMATS = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
PLAIN = [fmt for fmt in FORMATS if isinstance(fmt, PlainFormat)]


def any_bits(fmt: PlainFormat, shape: tuple[int, ...], seed: int) -> Tensor:
    size = torch.Size(shape).numel() * fmt.dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(fmt.dtype).view(shape)


@pytest.mark.parametrize("fmt", PLAIN, ids=lambda f: f.name)
@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(
    width=st.integers(1, 9),
    hidden=st.sampled_from([8, 24, 64]),
    tiles=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_packed_tiles_come_back_bit_by_bit(
    fmt: PlainFormat, width: int, hidden: int, tiles: int, seed: int
) -> None:
    size = fmt.tile_bytes(width, hidden)
    assert size == 3 * width * hidden * fmt.dtype.itemsize
    matrices = [any_bits(fmt, (tiles, width, hidden), seed + i) for i in range(3)]
    stride = -(-size // 128) * 128
    record = torch.full((tiles, stride), 0xFF, dtype=torch.uint8)
    for tile in range(tiles):
        fmt.pack_tile(*(m[tile] for m in matrices), record[tile, :size])
    for run in (slice(0, tiles), slice(tiles - 1, tiles)):
        for part, want in zip(fmt.tile_weights(record[run], width, hidden), matrices, strict=True):
            assert part.shape == want[run].shape
            assert torch.equal(part.view(torch.uint8), want[run].view(torch.uint8))
            assert part.untyped_storage().data_ptr() == record.untyped_storage().data_ptr()
    assert bool((record[:, size:] == 0xFF).all())


@pytest.mark.parametrize("fmt", PLAIN, ids=lambda f: f.name)
def test_a_transposed_down_matrix_packs_without_a_copy_of_its_own(fmt: PlainFormat) -> None:
    down = torch.randn(24, 8).to(fmt.dtype)
    out = torch.empty(fmt.tile_bytes(4, 24), dtype=torch.uint8)
    fmt.pack_tile(down.t()[:4], down.t()[4:], down.t()[:4], out)
    gate, up, down_t = fmt.tile_weights(out, 4, 24)
    assert torch.equal(gate, down.t()[:4]) and torch.equal(up, down.t()[4:]) and torch.equal(down_t, gate)


def test_just_one_format_detects_a_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert sum(fmt.detects(dtype) for fmt in FORMATS) == 1
    assert not any(fmt.detects(torch.int8) for fmt in FORMATS)
