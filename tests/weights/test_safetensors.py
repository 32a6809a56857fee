"""The safetensors container: what the standard writer wrote is read bit by bit; damage is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.weights import safetensors
from freetoken.weights.safetensors import INDEX_NAME, SafetensorsSource, open_directory

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
TENSORS = st.dictionaries(
    NAMES.filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from(DTYPES), SHAPES)
)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(wanted=TENSORS)
def test_what_the_standard_writer_wrote_is_read_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    tensors = {name: filled(*spec, seed=i) for i, (name, spec) in enumerate(wanted.items())}
    save_file(tensors, path, metadata={"format": "pt"})
    source = SafetensorsSource([path])
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape) and source.dtype(name) == tensor.dtype
        read = source.read(name)
        assert read.shape == tensor.shape and read.dtype == tensor.dtype and bits(read) == bits(tensor)
        if tensor.dim():
            middle = tensor.shape[0] // 2
            assert bits(source.read_rows(name, middle, tensor.shape[0])) == bits(tensor[middle:])
    source.close()


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_tensors_at_odd_offsets_are_read_too(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    write_raw(tmp_path / "m.safetensors", header, b"\x07" + struct.pack("<2f", 1.5, -2.0))
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    assert source.read("b").tolist() == [1.5, -2.0] and source.read("a").tolist() == [7]


def test_writing_into_a_tensor_never_changes_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    source = SafetensorsSource([tmp_path / "m.safetensors"])
    kept = source.read("a")
    kept.zero_()
    source.close()
    assert kept.tolist() == [0.0] * 4
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_an_unknown_tensor_is_refused_with_near_names(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError) as caught:
        SafetensorsSource([tmp_path / "m.safetensors"]).read("model.norm.weigth")
    assert caught.value.code == "missing_tensor" and "model.norm.weight" in caught.value.hint


HEADERS: dict[str, tuple[Any, str]] = {
    "not json": (b"{oops", "invalid_shard"),
    "a list": ([1], "invalid_shard"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "invalid_shard"),
    "unknown dtype": ({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, "invalid_shard"),
    "offsets don't fit": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "invalid_shard"),
    "negative size": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "invalid_shard"),
    "not an entry": ({"a": 5}, "invalid_shard"),
    "twice": (
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        b' "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
        "invalid_shard",
    ),
    "nested without end": (b"[" * 100_000, "invalid_shard"),
    "an endless size": (b'{"a": {"dtype": "U8", "shape": [1e999], "data_offsets": [0, 4]}}', "invalid_shard"),
    "beyond the end": ({"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}, "truncated_shard"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_damaged_header_names_its_file(fault: str, tmp_path: Path) -> None:
    header, code = HEADERS[fault]
    write_raw(tmp_path / "bad.safetensors", header, b"\0" * 8)
    with pytest.raises(WeightsError, match="bad.safetensors") as caught:
        SafetensorsSource([tmp_path / "bad.safetensors"])
    assert caught.value.code == code and caught.value.hint


NAME = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"__metadata__"', '"dtype"'])
KEY = st.sampled_from(['"dtype"', '"shape"', '"data_offsets"', '"data\\u005foffsets"', '"more"'])
VALUE = st.sampled_from(
    ['"U8"', '"F32"', '"F4"', "[]", "[1]", "[2]", "[0,1]", "[1,2]", "[4,0]", "[0,-1]", "[0.0,1]", '["0","1"]']
    + ["[0,1e999]", "7", "null", "{}", '"pt"']
)
USUAL = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def an_object(keys: st.SearchStrategy[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(keys, values).map(":".join), max_size=4)
    return pairs.map(lambda found: "{" + ",".join(found) + "}")


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(text=an_object(NAME, st.just(USUAL) | an_object(KEY, VALUE)) | st.text(max_size=30))
def test_what_is_decoded_quickly_is_what_the_slow_parser_finds(text: str) -> None:
    raw, path = text.encode(errors="replace"), Path("m.safetensors")
    quick = safetensors._decoded(raw, path, 8)
    if quick is not None:
        assert quick == safetensors._parsed(raw, path, 8)


def test_the_usual_header_is_decoded_quickly() -> None:
    text = f'{{"__metadata__":{{"format":"pt"}},"a":{USUAL}}}  '.encode()
    assert safetensors._decoded(text, Path("m"), 8) == safetensors._parsed(text, Path("m"), 8) != {}


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(keep=st.floats(0, 0.999), garbage=st.binary(max_size=64))
def test_any_cut_of_a_file_is_an_error_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, keep: float, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.safetensors"
    save_file({"a": torch.ones(40), "b": torch.zeros(3, 3)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(WeightsError) as caught:
        SafetensorsSource([path])
    assert caught.value.code in ("truncated_shard", "invalid_shard")
    path.write_bytes(garbage)
    with pytest.raises(WeightsError):
        SafetensorsSource([path])


def sharded(path: Path) -> Path:
    parts = {"one.safetensors": ("a", "b"), "two.safetensors": ("c",), "three.safetensors": ("d",)}
    for file, names in parts.items():
        save_file({name: torch.full((2,), ord(name)) for name in names}, path / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def relist(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((path / INDEX_NAME).read_text())
    change(index["weight_map"])
    (path / INDEX_NAME).write_text(json.dumps(index))


def test_a_complete_index_opens_and_strays_are_ignored(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    source = open_directory(sharded(tmp_path))
    assert sorted(source.names()) == ["a", "b", "c", "d"]
    assert source.read("a").tolist() == [97, 97]


def test_without_an_index_all_files_are_read(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX_NAME).unlink()
    assert sorted(open_directory(tmp_path).names()) == ["a", "b", "c", "d"]


def swap(path: Path) -> None:
    one, two = (path / f"{n}.safetensors" for n in ("one", "two"))
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def cut_short(path: Path) -> None:
    whole = (path / "two.safetensors").read_bytes()
    (path / "two.safetensors").write_bytes(whole[:-1])


TWO = "two.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a shard is gone": (lambda p: (p / TWO).unlink(), "missing_shard", TWO),
    "a shard is cut": (cut_short, "truncated_shard", TWO),
    "a shard is empty": (lambda p: (p / TWO).write_bytes(b""), "truncated_shard", TWO),
    "two shards are swapped": (swap, "stale_index", "one.safetensors"),
    "a listed name is nowhere": (
        lambda p: relist(p, lambda m: m.update(e=TWO)), "stale_index", "e is not in two",
    ),
    "a tensor is not listed": (
        lambda p: relist(p, lambda m: m.pop("b")), "stale_index", "b in one.safetensors",
    ),
    "a shard repeats a tensor": (
        lambda p: save_file({"c": torch.zeros(1), "a": torch.zeros(2)}, p / TWO),
        "duplicate_tensor", "a is in both",
    ),
    "the index is cut": (
        lambda p: (p / INDEX_NAME).write_text('{"weight_map": {'), "invalid_index", INDEX_NAME,
    ),
    "the index is empty": (lambda p: (p / INDEX_NAME).write_text("{}"), "invalid_index", INDEX_NAME),
    "the index points outside": (
        lambda p: relist(p, lambda m: m.update(a="../one.safetensors")), "invalid_index", "../one",
    ),
    "the index names what no disk can hold": (
        lambda p: relist(p, lambda m: m.update(a="a" * 3000)), "missing_shard", "a" * 3000,
    ),
    "the index is a folder": (
        lambda p: ((p / INDEX_NAME).unlink(), (p / INDEX_NAME).mkdir()), "invalid_index", INDEX_NAME,
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    break_it, code, words = DAMAGE[damage]
    break_it(sharded(tmp_path))
    with pytest.raises(WeightsError) as caught:
        open_directory(tmp_path)
    assert caught.value.code == code and words in caught.value.message and caught.value.hint


def test_the_same_tensor_in_two_files_without_an_index_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError) as caught:
        open_directory(tmp_path)
    assert caught.value.code == "duplicate_tensor"


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        open_directory(tmp_path)
    assert caught.value.code == "no_weights"
