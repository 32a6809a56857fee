"""GGUF blocks cut into tiles by the library: the bytes that packing codes gives, and the same refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.weights import BLOCKS, CodedMatrix
from freetoken.native import unblock
from freetoken.quant import _reading as reading
from freetoken.quant._coded import DOWN, GATE, MATRICES, UP
from freetoken.quant._gguf import GgufFormat

pytestmark = pytest.mark.skipif(not unblock.available(), reason="the native library is not built")
FORMATS = [f for n in choices.names("freetoken.quant") if isinstance(f := reading.find(n), GgufFormat)]
CUT = [f for f in FORMATS if f.blocks is not None]
SUBSETS = (MATRICES, (GATE,), (GATE, UP), (DOWN,))


def blocks(fmt: GgufFormat, rows: int, columns: int, seed: int) -> CodedMatrix:
    """Random bytes, every float16 factor a number."""
    draw = torch.Generator().manual_seed(seed)
    coded = fmt.encode(torch.randn(rows, columns, generator=draw))
    raw = fmt.to_gguf({**coded, "codes": coded["codes"][:, torch.randperm(columns, generator=draw)]})
    wide = torch.zeros(rows, raw.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = raw  # rows of a file lie anywhere
    shape = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
    return {BLOCKS: wide[:, 3:-3], "codes": shape}


def test_most_types_are_cut_by_the_library() -> None:
    assert len(CUT) >= len(FORMATS) - 2, [f.name for f in FORMATS if f not in CUT]


@pytest.mark.parametrize("fmt", CUT, ids=lambda f: f.name)
@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(tiles=st.integers(1, 3), wide=st.integers(1, 3), seed=st.integers(0, 99))
def test_blocks_become_the_tiles_that_their_codes_would(
    fmt: GgufFormat, tiles: int, wide: int, seed: int
) -> None:
    w, h = max(fmt.block, 32), fmt.columns_multiple * wide
    raw = {
        n: blocks(fmt, *s, seed + i)
        for i, (n, s) in enumerate(zip(MATRICES, _shapes(w * tiles, h), strict=True))
    }
    coded = {n: fmt.from_gguf(m[BLOCKS]) for n, m in raw.items()}
    for names in SUBSETS:
        got = torch.full((tiles, fmt.bytes_of(w, h, names) + 32), 0xAA, dtype=torch.uint8)
        want = got.clone()
        fmt.pack_some({n: raw[n] for n in names}, w, got[:, :-32])
        for tile, out in enumerate(want[:, :-32]):
            a, b = tile * w, (tile + 1) * w
            fmt._write({n: fmt._cut(coded[n], a, b, -1 if n == DOWN else -2) for n in names}, out)
        assert torch.equal(got, want), names


def _shapes(i: int, h: int) -> tuple[tuple[int, int], ...]:
    return (i, h), (i, h), (h, i)


@pytest.mark.parametrize("fmt", CUT, ids=lambda f: f.name)
@pytest.mark.parametrize("matrix", [GATE, DOWN])
def test_a_factor_that_is_no_number_is_refused(fmt: GgufFormat, matrix: str) -> None:
    w, h = max(fmt.block, 32), fmt.columns_multiple
    good = blocks(fmt, *((h, w) if matrix == DOWN else (w, h)), 5)
    coded = dict(fmt.from_gguf(good[BLOCKS]))
    part = next((p for p in fmt.parts if p.dtype == torch.float16), fmt.parts[0])
    bad: Tensor = coded[part.name].clone()
    bad.view(-1)[-1] = float("inf") if part.dtype == torch.float16 else 255
    broken = {**good, BLOCKS: fmt.to_gguf({**coded, part.name: bad})}
    out = torch.empty(fmt.bytes_of(w, h, (matrix,)), dtype=torch.uint8)
    fmt.pack_some({matrix: good}, w, out[None])
    with pytest.raises(WeightsError, match=fmt.name):
        fmt.pack_some({matrix: broken}, w, out[None])
