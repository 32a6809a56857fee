"""Dense matrices in FTW: codes stay codes, others are coded anew as their format codes a whole matrix."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.options import Options
from freetoken.core.weights import CodedMatrix
from freetoken.engine import dense_codes
from freetoken.engine.build import DEMO_MODEL, build
from freetoken.engine.convert import Wish, convert
from freetoken.engine.dense_codes import encode_piece
from freetoken.engine.survey import survey
from freetoken.models import llama
from freetoken.quant import _reading as reading
from freetoken.quant._coded import CodedFormat
from freetoken.weights import ftw_index
from freetoken.weights.files import Arena
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.weights import gguf_models

from .served import Served, text_ids
from .test_convert import WIDE, coded_gguf, plain

FORMATS = choices.names("freetoken.quant")
CODED = [name for name in FORMATS if isinstance(reading.find(name), CodedFormat)]
STACKING = [name for name in CODED if reading.stacks(name)]
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_coded_and_everything_else_keeps_its_numbers(name: str, tmp_path: Path) -> None:
    original = plain(tmp_path / "original", WIDE)
    done = convert(Wish(original, tmp_path / "ftw", dense=name, threads=2))
    ours, theirs = open_checkpoint(tmp_path / "ftw").source, open_checkpoint(original).source
    fmt = reading.find(name)
    coded = {n for n in ours.names() if ours.coding(n)}
    asked = {n for n in ours.names() if n.endswith("_proj.weight") or n == "lm_head.weight"}
    fits = {n for n in asked if theirs.shape(n)[1] % (1 if name in PLAIN else fmt.columns_multiple) == 0}
    assert "lm_head.weight" in fits and set(done.left_out) == asked - fits
    assert coded == (set() if name in PLAIN else fits)
    for tensor in ours.names():
        wanted = theirs.read(tensor)
        if tensor in coded:
            assert isinstance(fmt, CodedFormat)
            assert torch.equal(reading.numbers(ours, tensor), fmt.decode(fmt.encode(wanted.float())))
        else:
            is_cast = name in PLAIN and tensor in asked
            assert torch.equal(ours.read(tensor), wanted.to(PLAIN[name]) if is_cast else wanted)
    assert {group for group, *_ in done.errors} == {"attention", "head"}
    assert all(0 <= rms <= worst * 1.0001 < 0.35 for _, rms, worst in done.errors)


@pytest.mark.parametrize("name", CODED)
def test_pieces_of_a_matrix_are_coded_as_the_whole(name: str) -> None:
    fmt = reading.find(name)
    assert isinstance(fmt, CodedFormat)
    matrix = torch.randn(600, 256, generator=torch.Generator().manual_seed(1))
    matrix[70, 3] = -9.0  # the largest lies in the first piece only
    one_scale = any(not part.columns for part in fmt.parts)
    pieces = [encode_piece(fmt, p, torch.tensor(9.0) if one_scale else None) for p in matrix.split(256)]
    whole, joined = fmt.encode(matrix), dense_codes.joined(fmt, pieces)
    assert whole.keys() == joined.keys()
    assert all(torch.equal(whole[key].float(), joined[key].float()) for key in whole)


def test_large_matrices_are_coded_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = plain(tmp_path / "original", {**WIDE, "vocab_size": 900})
    wish = Wish(original, tmp_path / "whole", dense="nvfp4", threads=2)
    convert(wish)
    monkeypatch.setattr(dense_codes, "CHUNK_BYTES", 256 * 1024)
    seen: list[int] = []

    def counting(fmt: CodedFormat, piece: torch.Tensor, largest: torch.Tensor | None) -> CodedMatrix:
        seen.append(len(piece))
        return encode_piece(fmt, piece, largest)

    monkeypatch.setattr(dense_codes, "encode_piece", counting)
    convert(replace(wish, out=tmp_path / "pieces"))
    assert max(seen) == 256 and sum(seen) >= 900
    ours, theirs = (open_checkpoint(tmp_path / name).source for name in ("pieces", "whole"))
    for name in ours.names():
        assert torch.equal(reading.numbers(ours, name), reading.numbers(theirs, name))


def packed(fmt: CodedFormat, coded: CodedMatrix) -> torch.Tensor:
    rows, columns = coded["codes"].shape
    out = torch.empty(fmt.matrix_bytes(rows, columns), dtype=torch.uint8)
    fmt.pack_matrix(coded, out)
    return out


@pytest.mark.parametrize("name", STACKING)
def test_packed_matrices_are_put_one_below_the_other_without_being_unpacked(name: str) -> None:
    fmt = reading.find(name)
    assert isinstance(fmt, CodedFormat)
    rows, columns = (48, 16, 17), 256
    coded = [fmt.encode(torch.randn(n, columns, generator=torch.Generator().manual_seed(n))) for n in rows]
    together = fmt.below([packed(fmt, one) for one in coded], rows, columns)
    assert torch.equal(together, packed(fmt, reading.below(coded)))


@pytest.mark.parametrize("name", CODED)
def test_unpacking_a_matrix_inverts_packing(name: str) -> None:
    fmt = reading.find(name)
    assert isinstance(fmt, CodedFormat)
    coded = fmt.encode(torch.randn(130, 256, generator=torch.Generator().manual_seed(2)))
    back = fmt.unpack_matrix(packed(fmt, coded), (130, 256))
    assert back.keys() >= coded.keys()
    assert all(torch.equal(back[key].float(), coded[key].float()) for key in coded)


def trace(path: Path) -> list[Any]:
    served = Served(build(Options(model=str(path), device="cpu", max_model_len=256)))
    served.submit("a", text_ids(served.built, 1, 9) % served.built.config.vocab_size, 6)
    served.run()
    served.built.close()
    return list(served.trace("a"))


TEXT = {
    "tokenizer.huggingface.json": (DEMO_MODEL / "tokenizer.json").read_text(),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a"],
}


def test_a_coded_file_and_its_directory_give_the_same_bits(tmp_path: Path) -> None:
    original = coded_gguf(tmp_path / "m.gguf", TEXT)
    convert(Wish(original, tmp_path / "ftw", threads=2))
    found = trace(original)
    assert len(found) == 6 and found == trace(tmp_path / "ftw")


def test_a_model_without_experts_is_coded_and_served(tmp_path: Path) -> None:
    raw = {**llama.FAMILY.TINY, "hidden_size": 64}
    tensors = checkpoints.random_tensors(llama.FAMILY, raw)
    original = gguf_models.write(tmp_path / "m.gguf", raw, tensors, more=TEXT)
    wish = Wish(original, tmp_path / "ftw", experts="q8_0", dense="q8_0", threads=2, needs_experts=False)
    done = convert(wish)
    assert {group for group, *_ in done.errors} >= {"attention", "dense MLP", "head"}
    assert len(trace(wish.out)) == 6


def test_shapes_that_a_format_can_not_have_are_named(tmp_path: Path) -> None:
    original = plain(tmp_path / "original", {**WIDE, "hidden_size": 96, "moe_intermediate_size": 64})
    done = convert(Wish(original, tmp_path / "ftw", dense="q4_k", threads=2))
    source = open_checkpoint(tmp_path / "ftw").source
    assert "lm_head.weight" in done.left_out and not [n for n in done.left_out if source.coding(n)]


@pytest.mark.parametrize(
    "new", ["codes:q8_0", "codes:none", "codes:", "codes:bf16", "codes:nvfp4+q8_0", "codes:../x", "float32"]
)
def test_an_index_that_lies_about_codes_is_refused(new: str, tmp_path: Path) -> None:
    out = tmp_path / "ftw"
    convert(Wish(plain(tmp_path / "original", WIDE), out, dense="nvfp4", threads=2))
    index = out / ftw_index.INDEX_NAME
    body = json.loads(index.read_text())["index"]
    name = next(n for n, entry in body["tensors"].items() if entry[0] == "codes:nvfp4")
    body["tensors"][name][0] = new
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    index.write_text(f'{{"crc":"{zlib.crc32(text.encode()):08x}","index":{text}}}\n')
    with pytest.raises(WeightsError) as caught:
        survey(Options(device="cpu"), open_checkpoint(out), lambda phase, percent: None)
    assert caught.value.code == "invalid_index" and name in str(caught.value)


def test_a_flipped_bit_of_codes_is_found_and_named(tmp_path: Path) -> None:
    out = tmp_path / "ftw"
    convert(Wish(plain(tmp_path / "original", WIDE), out, dense="mxfp4", threads=2))
    index = ftw_index.load(out / ftw_index.INDEX_NAME)
    name, entry = next((n, e) for n, e in index.tensors.items() if e.coding)
    with (out / index.shards[entry.shard].file).open("r+b") as file:
        file.seek(entry.offset + 5)
        byte = file.read(1)
        file.seek(entry.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    checkpoint = open_checkpoint(out)
    with checkpoint.files.reading(Arena()), pytest.raises(WeightsError, match=name) as caught:
        reading.weight(checkpoint.source, [name])
    assert caught.value.code == "damaged_weights"
