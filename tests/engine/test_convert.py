"""Whatever a checkpoint is written in, its FTW directory fills the same bank and gives the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.options import Options
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.banks import Filling, make_bank
from freetoken.engine.build import DEMO_MODEL, build
from freetoken.engine.convert import Wish, Written, convert
from freetoken.engine.survey import expert_formats, find_family
from freetoken.experts.bank import ExpertBank
from freetoken.models import gpt_oss, qwen3_5_moe, qwen3_moe
from freetoken.quant import _reading as reading
from freetoken.quant import q4_0, q8_0
from freetoken.weights import load as weights_load
from freetoken.weights.files import Files
from freetoken.weights.ftw_verify import verify
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.weights import gguf_files, gguf_models
from tests.weights.dialect_writers import WRITERS, code

from .served import Served, alone, text_ids

FAMILY = qwen3_moe.FAMILY
SMALL = {**FAMILY.TINY, "num_hidden_layers": 2, "mlp_only_layers": []}
EXPERT = ("expert gate", "expert up", "expert down")
WIDE = {**SMALL, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 1}


def plain(path: Path, raw: dict[str, Any], dtype: torch.dtype = torch.float32, fused: bool = False) -> Path:
    family = find_family(raw["model_type"])
    tensors = checkpoints.random_tensors(family, raw, fused=fused)
    return checkpoints.write(path, raw, {name: t.to(dtype) for name, t in tensors.items()})


def dialect(path: Path, name: str) -> Path:
    writer = WRITERS[name]
    raw: dict[str, Any] = {**SMALL, **writer.extra}
    stored, _ = code(checkpoints.random_tensors(FAMILY, raw, fused=False), writer)
    if not writer.sidecar:
        raw["quantization_config"] = writer.settings
    checkpoints.write(path, raw, stored)
    if writer.sidecar:
        (path / writer.sidecar).write_text(json.dumps(writer.settings))
    return path


def coded_gguf(path: Path, more: Mapping[str, Any] | None = None) -> Path:
    """Matrices in random blocks of Q8_0 and Q4_0, layer by layer."""

    def code(name: str, matrix: Tensor) -> gguf_files.Blob:
        fmt, kind = (q4_0.FORMAT, "Q4_0") if name.startswith("blk.1.") else (q8_0.FORMAT, "Q8_0")
        size = fmt.gguf_bytes * matrix.numel() // fmt.gguf_columns
        raw = np.random.default_rng(len(name)).integers(0, 256, size, dtype=np.uint8)
        raw.reshape(-1, fmt.gguf_bytes)[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        return gguf_files.blocks(raw, kind, matrix.shape)

    raw = {**SMALL, "moe_intermediate_size": 64}
    return gguf_models.write(path, raw, checkpoints.random_tensors(FAMILY, raw), code, more=more)


def bank_of(path: Path) -> ExpertBank:
    """The bank as serving would fill it."""
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint.model_type)
    config = family.read_config(checkpoint.config)
    family.check(config, checkpoint.source)
    formats = expert_formats(family, config, checkpoint)
    bank = make_bank(config, formats, checkpoint.records)
    filling = Filling(family, config, checkpoint, bank, CpuDevice())
    filling.start()
    filling.wait()
    return bank


def same_records(a: ExpertBank, b: ExpertBank) -> None:
    assert a.layouts == b.layouts and [f.name for f in a.formats] == [f.name for f in b.formats]
    for layer, one in enumerate(a.layouts):
        for expert in range(a.num_experts):
            left, right = (one.tiles(bank.place(layer, expert))[:, : one.code_bytes] for bank in (a, b))
            assert torch.equal(left, right)
            head = slice(0, one.header_bytes)
            assert torch.equal(a.place(layer, expert)[head], b.place(layer, expert)[head])


CASES: dict[str, Callable[[Path], Path]] = {
    "bfloat16": lambda p: plain(p, SMALL, torch.bfloat16),
    "float16, fused": lambda p: plain(p, SMALL, torch.float16, fused=True),
    "float32, shared expert": lambda p: plain(p, dict(qwen3_5_moe.FAMILY.TINY)),
    "biased, interleaved": lambda p: plain(p, dict(gpt_oss.FAMILY.TINY)),
    **{f"dialect {name}": (lambda p, name=name: dialect(p, name)) for name in WRITERS},
}


@pytest.mark.parametrize("case", CASES)
def test_records_and_tensors_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    original = CASES[case](tmp_path / "original")
    done = convert(Wish(original, tmp_path / "ftw", shard_bytes=1 << 17, threads=2))
    same_records(bank_of(tmp_path / "ftw"), bank_of(original))
    ours, theirs = open_checkpoint(tmp_path / "ftw").source, open_checkpoint(original).source
    dense = [n for n in theirs.names() if ".experts." not in n]
    assert sorted(ours.names()) == sorted(dense) and done.num_tensors == len(dense)
    for name in dense:
        wanted = reading.numbers(theirs, name)
        got = reading.numbers(ours, name)
        assert torch.equal(got, wanted.to(got.dtype)) and (theirs.coding(name) or got.dtype == wanted.dtype)
        if theirs.coding(name) and theirs.columns(name) is None:
            assert ours.coding(name) == theirs.coding(name), "codes became numbers"
    assert not verify(tmp_path / "ftw").damaged and not done.errors


@pytest.mark.parametrize("name", choices.names("freetoken.quant"))
def test_experts_coded_on_the_way_are_packed_as_the_format_packs_numbers(name: str, tmp_path: Path) -> None:
    original = plain(tmp_path / "original", WIDE)
    done = convert(Wish(original, tmp_path / "ftw", experts=name, threads=2))
    numbers = bank_of(original)
    fmt, made = reading.find(name), bank_of(tmp_path / "ftw")
    assert done.formats == (name,) and {f.name for f in made.formats} == {name}
    packed = ExpertBank(made.layouts, made.formats, made.num_experts)
    packed.buffer.zero_()
    squares = torch.zeros(2, 3)
    for expert in range(made.num_experts):
        one, other = numbers.layouts[0], made.layouts[0]
        exact = reading.find("f32").tile_weights(
            one.tiles(numbers.place(0, expert))[:, : one.code_bytes], one.tile_width, one.hidden
        )
        gate, up, down_t = (part.flatten(0, 1) for part in exact)
        packed.put(0, expert, gate, up, down_t.t())
        decoded = fmt.tile_weights(
            other.tiles(made.place(0, expert))[:, : other.code_bytes], other.tile_width, other.hidden
        )
        for i, (wanted, got) in enumerate(zip((gate, up, down_t), decoded, strict=True)):
            squares[:, i] += torch.stack([(wanted - got.flatten(0, 1)).square().sum(), wanted.square().sum()])
    same_records(packed, made)
    relative = dict(zip(EXPERT, (squares[0] / squares[1]).sqrt().tolist(), strict=True))
    assert {n: rms for n, rms, _ in done.errors} == pytest.approx(relative, rel=1e-3, abs=1e-9)
    assert all(worst >= rms for _, rms, worst in done.errors)


def test_the_blocks_of_a_gguf_file_are_kept(tmp_path: Path) -> None:
    text = {
        "tokenizer.huggingface.json": (DEMO_MODEL / "tokenizer.json").read_text(),
        "tokenizer.chat_template": (DEMO_MODEL / "chat_template.jinja").read_text(),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
    }
    original = coded_gguf(tmp_path / "model.gguf", text)
    done = convert(Wish(original, tmp_path / "ftw", threads=2))
    assert done.formats == ("q8_0", "q4_0")
    same_records(bank_of(tmp_path / "ftw"), bank_of(original))
    ours, theirs = open_checkpoint(tmp_path / "ftw").source, open_checkpoint(original).source
    for name in ours.names():
        wanted = reading.numbers(theirs, name)
        assert torch.equal(reading.numbers(ours, name), wanted.to(ours.dtype(name)))
        assert ours.coding(name) == theirs.coding(name)
    assert (tmp_path / "ftw" / "tokenizer.json").is_file()


def test_a_gguf_file_without_a_vocabulary_makes_no_directory_that_could_not_be_served(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="tokenizer"):
        convert(Wish(coded_gguf(tmp_path / "model.gguf"), tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    out = tmp_path_factory.mktemp("demo") / "ftw"
    return out, convert(Wish(DEMO_MODEL, out, shard_bytes=4 << 20, threads=2))


@pytest.mark.parametrize("backend", ["cpu", "fused"])
def test_answers_are_bit_by_bit_those_of_the_original(demo: tuple[Path, Written], backend: str) -> None:
    wishes: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "moe_backend": backend}
    served = Served(build(Options(model=str(demo[0]), **wishes), early=True))
    served.submit("a", text_ids(served.built, 3, 20), 6)
    served.run()
    served.built.close()
    assert served.trace("a") == alone(3, 20, 6, **wishes)


class CountingFiles(Files):
    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def read_into(self, path: Path, offset: int, out: Tensor, least: int | None = None) -> None:
        self.read_bytes += out.numel()
        super().read_into(path, offset, out, least)


def test_serving_on_the_cpu_reads_every_record_once_and_nothing_else(demo: tuple[Path, Written]) -> None:
    files = CountingFiles()
    options = Options(model=str(demo[0]), device="cpu", max_model_len=512, moe_backend="cpu")
    built = build(options, files=files)
    bank = built.filling.bank
    built.close()
    experts = sum(p.stat().st_size - 4096 for p in demo[0].glob("experts-*.ftw"))
    dense = sum(p.stat().st_size for p in demo[0].glob("dense-*.ftw"))
    assert bank.total_bytes == experts <= files.read_bytes <= experts + dense


class Tired(Files):
    """Fails after a number of reads."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self._left = reads

    def read_into(self, path: Path, offset: int, out: Tensor, least: int | None = None) -> None:
        self._left -= 1
        if self._left < 0:
            raise WeightsError("the disk is tired")
        super().read_into(path, offset, out, least)


def interrupted(wish: Wish, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(weights_load, "Files", lambda: Tired(reads))
        with pytest.raises(WeightsError, match="tired"):
            convert(wish)


def contents(path: Path) -> dict[str, bytes]:
    """All files but what tells conversions apart."""
    found = {p.name: p.read_bytes() for p in path.iterdir()}
    index = json.loads(found.pop("ftw.json"))["index"]
    del index["set"]
    shards = {name: data[4096:] for name, data in found.items() if name.endswith(".ftw")}
    return {**found, **shards, "index": json.dumps(index).encode()}


def test_an_interrupted_conversion_goes_on_where_it_stopped(
    demo: tuple[Path, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Wish(DEMO_MODEL, tmp_path / "out", shard_bytes=4 << 20, threads=2)
    for reads in (150, 100, 300):
        interrupted(wish, reads, monkeypatch)
        assert not wish.out.exists()
    done = convert(wish)
    assert 100 < done.resumed < demo[1].num_records + demo[1].num_tensors
    assert contents(wish.out) == contents(demo[0]) and not (tmp_path / "out.partial").exists()


def test_what_an_interruption_damaged_is_written_again(
    demo: tuple[Path, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = Wish(DEMO_MODEL, tmp_path / "out", shard_bytes=4 << 20, threads=2)
    interrupted(wish, 400, monkeypatch)
    partial = tmp_path / "out.partial"
    journal = partial / "ftw.journal"
    lines = len(journal.read_text().splitlines())
    for shard in ("dense-00001.ftw", "experts-00001.ftw"):
        with (partial / shard).open("r+b") as file:
            file.seek(4096)
            file.write(b"\xaa" * 64)
    journal.write_text(journal.read_text() + "deadbe")  # the last line was cut
    done = convert(wish)
    assert done.resumed == lines - 1 - 2 and contents(wish.out) == contents(demo[0])


def test_a_run_with_other_wishes_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Wish(DEMO_MODEL, tmp_path / "out", threads=2)
    interrupted(wish, 400, monkeypatch)
    assert convert(Wish(DEMO_MODEL, tmp_path / "out", experts="q8_0", threads=2)).resumed == 0


def test_an_ftw_directory_is_not_converted_again(demo: tuple[Path, Written], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FTW directory already"):
        convert(Wish(demo[0], tmp_path / "x"))
