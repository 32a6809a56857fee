"""Every coded format: packing is invertible, quantising is within its error, damaged parts are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout
from freetoken.quant._coded import CodedFormat
from freetoken.quant._int4 import Int4
from freetoken.quant._levels import LevelFormat
from tests.quant.specimens import drawn

FORMATS = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
CODED = [fmt for fmt in FORMATS if isinstance(fmt, CodedFormat)]
SHARED = settings(max_examples=6, deadline=None, database=None, derandomize=True)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
@SHARED
@given(tiles=st.integers(1, 3), wide=st.integers(1, 4), seed=st.integers(0, 99))
def test_an_expert_in_codes_is_laid_out_and_comes_back_bit_by_bit(
    fmt: CodedFormat, tiles: int, wide: int, seed: int
) -> None:
    width = max(fmt.block, 32)
    h, i = fmt.columns_multiple * wide, width * tiles
    bank = ExpertBank([layout(h, i, fmt, width)], [fmt], 1)
    matrices = (drawn(fmt, i, h, seed), drawn(fmt, i, h, seed + 1), drawn(fmt, h, i, seed + 2))
    bank.put_coded(0, 0, matrices)
    assert not bank.missing()
    one = bank.layouts[0]
    raw = bank.record(0)[one.tiles_offset : one.used_bytes].view(tiles, one.tile_bytes)
    for t in range(tiles):
        back = fmt.unpack(raw[t, : one.code_bytes], width, h)
        cuts = [
            fmt._cut(m, t * width, (t + 1) * width, axis)
            for m, axis in zip(matrices, (-2, -2, -1), strict=True)
        ]
        assert all(same(a, b) for a, b in zip(back, cuts, strict=True))
    gate, up, down_t = fmt.tile_weights(raw[:, : one.code_bytes], width, h)
    whole = [fmt.decode(m) for m in matrices]
    assert torch.equal(gate.reshape(i, h), whole[0]) and torch.equal(up.reshape(i, h), whole[1])
    assert torch.equal(down_t.reshape(i, h), whole[2].t())


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
def test_all_tiles_at_once_are_the_bytes_of_one_after_the_other(fmt: CodedFormat) -> None:
    width, count, h = max(fmt.block, 32), 5, 2 * fmt.columns_multiple
    i = width * count
    made = {"gate": drawn(fmt, i, h, 1), "up": drawn(fmt, i, h, 2), "down": drawn(fmt, h, i, 3)}
    tiles = torch.full((count, fmt.tile_bytes(width, h) + 64), 7, dtype=torch.uint8)
    fmt.pack_some(made, width, tiles[:, :-64])
    for tile, row in enumerate(tiles):
        wanted = torch.full_like(row, 7)
        cut = slice(tile * width, (tile + 1) * width)
        fmt._write(
            {n: fmt._cut(m, cut.start, cut.stop, -1 if n == "down" else -2) for n, m in made.items()},
            wanted[:-64],
        )
        assert torch.equal(row, wanted)


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
@SHARED
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 100.0]))
def test_quantising_stays_within_the_stated_error(fmt: CodedFormat, seed: int, scale: float) -> None:
    matrix = torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)) * scale
    matrix[3] = 0
    back = fmt.decode(fmt.encode(matrix))
    error = float((back - matrix).abs().max() / matrix.abs().max())
    assert error <= fmt.error and bool((back[3] == 0).all())
    again = fmt.decode(fmt.encode(back))
    assert float((again - back).abs().max()) <= fmt.error * float(back.abs().max())


@pytest.mark.parametrize("fmt", [f for f in CODED if isinstance(f, LevelFormat)], ids=lambda f: f.name)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_of_one_sign_keep_their_size(fmt: CodedFormat, sign: float) -> None:
    """Most formats with a least have none above zero."""
    alike, near = torch.full((2, 512), sign), sign * (0.9 + 0.2 * torch.rand(4, 512))
    for weights in (alike, near):
        error = (fmt.decode(fmt.encode(weights)) - weights).abs().max()
        assert error <= fmt.error * weights.abs().max()


def test_checkpoint_forms_come_back_byte_by_byte() -> None:
    byte = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8)  # noqa: E731
    by_name = {fmt.name: fmt for fmt in CODED}
    blocks, scales = byte(6, 4, 16), byte(6, 4)
    assert all(
        map(
            torch.equal,
            by_name["mxfp4"].to_blocks(by_name["mxfp4"].from_blocks(blocks, scales)),
            (blocks, scales),
        )
    )
    packed, whole = byte(5, 32), torch.tensor(0.5)
    back = by_name["nvfp4"].to_packed(by_name["nvfp4"].from_packed(packed, torch.ones(5, 4), whole))
    assert torch.equal(back[0], packed) and float(back[2]) == 0.5
    codes = byte(130, 256).view(torch.float8_e4m3fn)
    for name, shape in (("fp8_block", (2, 2)), ("fp8_channel", (130,)), ("fp8_tensor", ())):
        fmt, scales = by_name[name], torch.rand(shape)
        back = fmt.to_tensors(fmt.from_tensors(codes, scales))
        assert torch.equal(back[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(back[1].reshape(-1), scales.reshape(-1))


INT4 = [fmt for fmt in CODED if isinstance(fmt, Int4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", INT4, ids=lambda f: f.name)
def test_int4_takes_scales_of_any_16_bit_type_without_loss(fmt: Int4, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (6, 256), dtype=torch.uint8, generator=draw)
    scales = torch.randn(6, 256 // fmt.group, generator=draw).bfloat16() * 2.0**-70
    scales = scales.half() if dtype == torch.float16 else scales.to(dtype)
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8, generator=draw) if fmt.affine else None
    coded = fmt.from_tensors(codes, scales, zeros)
    back = fmt.to_tensors(coded)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales.float())
    assert zeros is None or (back[2] is not None and torch.equal(back[2], zeros))
    centre = 8 if zeros is None else zeros.float().repeat_interleave(fmt.group, -1)
    want = (codes.float() - centre) * scales.float().repeat_interleave(fmt.group, -1)
    assert torch.equal(fmt.decode(coded), want)


def test_int4_refuses_scales_that_float16_cannot_hold() -> None:
    fmt, codes = INT4[0], torch.zeros(1, 2 * INT4[0].group, dtype=torch.uint8)
    for scales in ([0.1, 0.2], [1e-30, 1e30]):
        with pytest.raises(WeightsError, match="more digits or range"):
            fmt.from_tensors(codes, torch.tensor([scales]))
    with pytest.raises(WeightsError, match="not a finite number"):
        fmt.refuse(fmt.from_tensors(codes, torch.tensor([[float("nan"), 1.0]])))


def test_a_q4_k_block_means_what_gguf_says() -> None:
    """One block by hand: d 0.5, dmin 0.25, every scale and minimum its own number."""
    fmt = next(fmt for fmt in CODED if fmt.name == "q4_k")
    sc, mn = list(range(40, 48)), list(range(8, 16))
    six = [s & 63 | (t >> 4) << 6 for s, t in zip(sc[:4], sc[4:], strict=True)]
    six += [m & 63 | (t >> 4) << 6 for m, t in zip(mn[:4], mn[4:], strict=True)]
    six += [s & 15 | (m & 15) << 4 for s, m in zip(sc[4:], mn[4:], strict=True)]
    factors = torch.tensor([0.5, 0.25]).half().view(torch.uint8)
    raw = torch.cat(
        [factors, torch.tensor(six, dtype=torch.uint8), torch.full((128,), 0x73, dtype=torch.uint8)]
    )
    got = fmt.decode(fmt.from_gguf(raw[None]))[0]
    for block in range(8):
        code = 7 if block % 2 else 3
        want = 0.5 * sc[block] * code - 0.25 * mn[block]
        assert bool((got[32 * block : 32 * block + 32] == want).all())


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
def test_scales_that_are_no_numbers_are_refused(fmt: CodedFormat) -> None:
    h, w = fmt.columns_multiple, max(fmt.block, 32)
    out = torch.empty(fmt.tile_bytes(w, h), dtype=torch.uint8)
    part = next((p for p in fmt.parts if p.dtype.is_floating_point), fmt.parts[0])
    good = drawn(fmt, w, h, 0), drawn(fmt, w, h, 1), drawn(fmt, h, w, 2)
    fmt.pack(*good, out)
    good[1][part.name].view(-1)[-1] = float("nan") if part.dtype.is_floating_point else 255
    with pytest.raises(WeightsError, match="not a finite number"):
        fmt.pack(*good, out)


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
def test_shapes_that_cut_a_block_are_refused(fmt: CodedFormat) -> None:
    with pytest.raises(WeightsError, match="multiples of"):
        fmt.tile_bytes(fmt.block, fmt.columns_multiple + 8)
