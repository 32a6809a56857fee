"""Experts of several formats: a tile holds each matrix as its own format would, bit by bit."""

from __future__ import annotations

import pytest
import torch

from freetoken.core.errors import WeightsError
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout
from freetoken.quant import _reading as reading
from freetoken.quant._coded import CodedFormat
from freetoken.quant._mixed import MixedFormat, joined_name, split_name
from tests.quant.test_coded import drawn

PAIRS = ["q4_k+q6_k", "q4_0+q8_0", "q5_0+q4_1", "q8_0+q5_1+q4_0", "nvfp4+q8_0", "q6_k+nvfp4"]


@pytest.mark.parametrize("name", PAIRS)
def test_each_matrix_comes_back_as_its_own_format_decodes_it(name: str) -> None:
    fmt = reading.find(name)
    assert isinstance(fmt, MixedFormat) and fmt.name == name
    parts = [reading.find(part) for part in split_name(name)]
    h, i = 256, 512
    matrices = []
    for seed, (part, shape) in enumerate(zip(parts, ((i, h), (i, h), (h, i)), strict=True)):
        assert isinstance(part, CodedFormat)
        matrices.append(drawn(part, *shape, seed))
    bank = ExpertBank([layout(h, i, fmt)], [fmt], 1)
    gate, up, down = matrices
    bank.put_coded(0, 0, (gate, up, down))
    one = bank.layouts[0]
    tiles = bank.record(0)[one.tiles_offset : one.used_bytes].view(one.num_tiles, one.tile_bytes)
    got = fmt.tile_weights(tiles[:, : one.code_bytes], one.tile_width, h)
    whole = [part.decode(m) for part, m in zip(parts, matrices, strict=True)]
    assert torch.equal(got[0].reshape(i, h), whole[0]) and torch.equal(got[1].reshape(i, h), whole[1])
    assert torch.equal(got[2].reshape(i, h), whole[2].t())
    assert bank.codes(0) == name


def test_plain_matrices_are_quantised_by_each_part() -> None:
    fmt = reading.find("q8_0+q4_0")
    x = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((32, 64), (32, 64), (64, 32))]
    out = torch.empty(fmt.tile_bytes(32, 64), dtype=torch.uint8)
    fmt.pack_tile(x[0], x[1], x[2].t(), out)
    gate, _, down_t = fmt.tile_weights(out, 32, 64)
    assert float((gate - x[0]).abs().max()) < 0.03 and 0.03 < float((down_t - x[2].t()).abs().max()) < 0.5


def test_names_join_and_split() -> None:
    for three, name in ((["a", "a", "a"], "a"), (["a", "a", "b"], "a+b"), (["a", "b", "b"], "a+b+b")):
        assert joined_name(three) == name and split_name(name) == three


def test_coded_and_plain_matrices_share_no_record() -> None:
    with pytest.raises(WeightsError, match=r"f16\+q8_0"):
        reading.find("f16+q8_0")
