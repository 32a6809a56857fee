"""The FTW container: what was written is read bit by bit; whatever is wrong with a directory is named."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.core.errors import CapacityError, ConfigError, WeightsError
from freetoken.weights import ftw_index
from freetoken.weights.files import Files
from freetoken.weights.ftw import DTYPES, FtwSource, dtype_name
from freetoken.weights.ftw_index import Index
from freetoken.weights.ftw_verify import verify
from freetoken.weights.ftw_writer import FtwWriter, TensorSpec, place
from freetoken.weights.load import open_checkpoint

LAYOUT = {"hidden": 8, "expert_size": 8, "tile_width": 8, "code_bytes": 384}
EXPERTS = 5
SPECS = st.lists(
    st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 15), max_size=3).map(tuple)),
    max_size=6,
)


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    if dtype == torch.bool:
        return random_bytes(torch.Size(shape).numel(), seed).bool().reshape(shape)
    raw = random_bytes(torch.Size(shape).numel() * dtype.itemsize, seed)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def spec(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    return name, dtype_name(dtype), shape, torch.Size(shape).numel() * dtype.itemsize


def write(
    out: Path, tensors: dict[str, Tensor], records: list[int], shard_bytes: int = 1 << 30, order: int = 0
) -> Index:
    """Layers of EXPERTS random records of the given sizes, pieces in an order of their own."""
    specs = [spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    plan = place(specs, [("bf16", LAYOUT, size) for size in records], EXPERTS, shard_bytes)
    writer = FtwWriter(out, plan, "test")
    work: list[Callable[[], None]] = [lambda n=n, t=t: writer.put(n, iter([t])) for n, t in tensors.items()]
    for layer, size in enumerate(records):
        for expert in range(EXPERTS):
            record = random_bytes(size, 100 * layer + expert)
            work.append(lambda at=(layer, expert), r=record: writer.put_record(*at, r))
    random.Random(order).shuffle(work)
    for one in work:
        one()
    return writer.finish({"config.json": b'{"model_type": "null"}'}, {"model": "test"})


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(specs=SPECS, records=st.lists(st.sampled_from([4096, 12288]), max_size=3), order=st.integers(0, 99))
def test_what_was_written_is_read_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, specs: list, records: list[int], order: int
) -> None:
    out = tmp_path_factory.mktemp("ftw") / "model"
    tensors = {f"t.{i}": made(*spec, seed=i) for i, spec in enumerate(specs)}
    index = write(out, tensors, records, shard_bytes=20000, order=order)
    source = FtwSource(out, Files())
    assert set(source.names()) == set(tensors) and source.holds_records
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape) and source.dtype(name) == tensor.dtype
        read = source.read(name)
        assert read.shape == tensor.shape and read.dtype == tensor.dtype and bits(read) == bits(tensor)
        if tensor.dim() and len(tensor):
            assert bits(source.read_rows(name, 1, len(tensor))) == bits(tensor[1:])
    for layer, one in enumerate(source.index.layers):
        for run in one.runs:
            raw = (out / index.shards[run.shard].file).read_bytes()[run.offset :]
            assert run.offset % 4096 == 0
            for i in range(run.count):
                wanted = bits(random_bytes(one.record_bytes, 100 * layer + run.first + i))
                assert raw[i * one.record_bytes : (i + 1) * one.record_bytes] == wanted
    for number, shard in enumerate(index.shards):
        assert shard.num_bytes <= 20480 or sum(size > 0 for _, size, _, _ in index.pieces(number)) == 1
    found = verify(out)
    assert not found.damaged and found.num_bytes == sum(p.stat().st_size for p in out.glob("*.ftw"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "model"
    tensors = {"model.norm.weight": torch.randn(100), "model.embed.weight": torch.randn(50, 7)}
    write(out, tensors, [4096, 8192], shard_bytes=24000)
    return out


def pristine(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def fault_of(path: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    assert caught.value.hint
    return caught.value


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(model: Path, at: float, bit: int) -> None:
    files = sorted(p for p in model.iterdir())
    place_of = int(at * sum(p.stat().st_size for p in files))
    for path in files:
        if place_of < path.stat().st_size:
            break
        place_of -= path.stat().st_size
    good = path.read_bytes()
    try:
        path.write_bytes(good[:place_of] + bytes([good[place_of] ^ 1 << bit]) + good[place_of + 1 :])
        try:
            found = verify(model).damaged
        except WeightsError as error:
            found = [error.message]
        assert len(found) == 1 and path.name in found[0], (path.name, place_of, found)
    finally:
        path.write_bytes(good)


def test_reading_a_damaged_tensor_refuses_it_by_name(model: Path, tmp_path: Path) -> None:
    path = pristine(model, tmp_path)
    entry = ftw_index.load(path / "ftw.json").tensors["model.embed.weight"]
    with (path / "dense-00001.ftw").open("r+b") as file:
        file.seek(entry.offset + 5)
        file.write(b"\x99")
    source = open_checkpoint(path).source
    with pytest.raises(WeightsError, match=r"model\.embed\.weight in dense-00001\.ftw") as e:
        source.read("model.embed.weight")
    assert e.value.code == "damaged_weights"
    source.read("model.norm.weight")


def test_a_missing_shard_is_refused_with_what_it_holds(model: Path, tmp_path: Path) -> None:
    path = pristine(model, tmp_path)
    (path / "experts-00002.ftw").unlink()
    error = fault_of(path)
    assert error.code == "missing_shard"
    assert "experts-00002.ftw is missing. It holds expert 4 of MoE layer 0 and 1 more." in error.message


@pytest.mark.parametrize("keep", [0, 4095, 4096, 5000, 12288, 20000])
def test_a_truncated_shard_names_the_first_thing_lost(model: Path, tmp_path: Path, keep: int) -> None:
    path = pristine(model, tmp_path)
    shard = path / "experts-00001.ftw"
    shard.write_bytes(shard.read_bytes()[:keep])
    error = fault_of(path)
    first = max(keep - 4096, 0) // 4096
    assert error.code == "truncated_shard" and f"expert {first} of MoE layer 0" in error.message


def test_a_shard_of_another_conversion_or_place_is_refused(model: Path, tmp_path: Path) -> None:
    path = pristine(model, tmp_path)
    other = tmp_path / "other"
    tensors = {"model.norm.weight": torch.randn(100), "model.embed.weight": torch.randn(50, 7)}
    write(other, tensors, [4096, 8192], shard_bytes=24000)
    shutil.copy(other / "dense-00001.ftw", path / "dense-00001.ftw")
    error = fault_of(path)
    assert error.code == "foreign_shard" and "model.norm.weight" in error.message
    path = pristine(model, tmp_path / "again")
    one, two = path / "experts-00002.ftw", path / "experts-00003.ftw"
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1]), two.write_bytes(data[0])
    assert fault_of(path).code in ("foreign_shard", "truncated_shard")


def changed(path: Path, change: Callable[[dict], None]) -> None:
    body = json.loads((path / "ftw.json").read_text())["index"]
    change(body)
    text = json.dumps(body, separators=(",", ":")).encode()
    (path / "ftw.json").write_bytes(b'{"crc":"%08x","index":%s}\n' % (zlib.crc32(text), text))


BAD_INDEX: dict[str, Callable[[dict], None]] = {
    "another version": lambda b: b.update(version=3),
    "a file elsewhere": lambda b: b["files"].update({"../x": 1}),
    "a shard elsewhere": lambda b: b["shards"][0].__setitem__(0, "/etc/passwd"),
    "a tensor beyond its shard": lambda b: b["tensors"]["model.norm.weight"].__setitem__(3, 1 << 40),
    "a tensor of wrong size": lambda b: b["tensors"]["model.norm.weight"].__setitem__(1, [101]),
    "an unknown type": lambda b: b["tensors"]["model.norm.weight"].__setitem__(0, "float3"),
    "an expert twice": lambda b: b["layers"][0]["runs"].append(b["layers"][0]["runs"][0]),
    "an expert missing": lambda b: b["layers"][1]["runs"].pop(),
    "checksums missing": lambda b: b["layers"][1].update(crcs=""),
    "no shards": lambda b: b.update(shards=[]),
    "no index": lambda b: b.clear(),
}


@pytest.mark.parametrize("fault", BAD_INDEX)
def test_an_index_that_promises_the_impossible_is_refused(model: Path, tmp_path: Path, fault: str) -> None:
    path = pristine(model, tmp_path)
    changed(path, BAD_INDEX[fault])
    error = fault_of(path)
    assert error.code == "invalid_index" and "ftw.json" in error.message


def test_the_first_version_is_refused_with_the_line_to_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "null"}')
    (tmp_path / "freetoken_weight.json").write_text('{"format": "freetoken_weight", "version": 1}')
    error = fault_of(tmp_path)
    assert error.code == "unsupported_container" and "ft checkpoint --model" in error.hint


def test_an_unfinished_directory_is_refused_and_told_how_to_go_on(tmp_path: Path) -> None:
    plan = place([spec("a", torch.uint8, (10,))], [], 0, 1 << 20)
    writer = FtwWriter(tmp_path / "model", plan, "test")
    writer.abandon()
    error = fault_of(tmp_path / "model.partial")
    assert error.code == "unfinished_checkpoint" and not (tmp_path / "model").exists()


def test_what_is_there_is_never_written_over(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "diary.txt").write_text("mine")
    with pytest.raises(ConfigError) as e:
        FtwWriter(tmp_path / "x", place([], [], 0, 1 << 20), "test")
    assert e.value.code == "output_exists" and (tmp_path / "x.partial" / "diary.txt").exists()
    with pytest.raises(ConfigError) as e:
        FtwWriter(model, place([], [], 0, 1 << 20), "test")
    assert e.value.code == "output_exists"


def test_a_model_larger_than_the_disk_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="1024 TiB") as e:
        FtwWriter(tmp_path / "m", place([spec("a", torch.uint8, (1 << 50,))], [], 0, 1 << 60), "test")
    assert e.value.code == "disk_full" and not (tmp_path / "m.partial").exists()


def test_a_tensor_that_is_not_what_was_announced_is_refused(tmp_path: Path) -> None:
    writer = FtwWriter(tmp_path / "m", place([spec("a", torch.float32, (4, 3))], [], 0, 1 << 20), "test")
    for wrong in (
        [torch.zeros(4, 3).half()],
        [torch.zeros(3, 3)],
        [torch.zeros(4, 3), torch.zeros(1, 3)],
        [],
    ):
        with pytest.raises(WeightsError):
            writer.put("a", iter(wrong))
    writer.put("a", iter([torch.ones(1, 3), torch.zeros(3, 3)]))
    writer.finish({}, {})
    assert FtwSource(tmp_path / "m", Files()).read("a")[0].tolist() == [1.0] * 3
    assert dtype_name(torch.float8_e4m3fn) in DTYPES
