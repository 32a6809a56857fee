"""GGUF files: what was written is read, and every damage is refused by name within a second."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.errors import WeightsError
from freetoken.weights.gguf import GgufFile
from freetoken.weights.gguf_split import GgufModel, models_in
from freetoken.weights.gguf_types import TYPES
from freetoken.weights.load import open_checkpoint
from tests.weights import gguf_files as files

META: dict[str, Any] = {
    "general.architecture": "llama",
    "a.text": "grüße",
    "a.many": ["x", "", "yz"],
    "a.b": True,
}


def specimen(path: Path, **more: files.Blob) -> Path:
    tensors = {"one.weight": files.plain(torch.arange(6.0).view(2, 3)), **more}
    return files.write_file(path / "m.gguf", META, tensors)


def test_metadata_and_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    raw = bytes(range(36))
    metadata = {**META, "a.n": 7, "a.f": 0.5, "a.ns": [1, 2, 3], "a.fs": [0.5, 1.5]}
    tensors = {
        "t.weight": files.plain(torch.randn(3, 4, 5), "F16"),
        "q.weight": ("Q4_0", (2, 32), raw),
        "v": files.plain(torch.arange(3.0)),
        "none": files.plain(torch.zeros(0, 4)),
    }
    for version in (2, 3):
        file = GgufFile(files.write_file(tmp_path / "m.gguf", metadata, tensors, version))
        assert dict(file.metadata) == metadata and list(file.metadata) == list(metadata)
        assert {n: (t.type.name, t.shape) for n, t in file.tensors.items()} == {
            n: blob[:2] for n, blob in tensors.items()
        }
        for name, tensor in file.tensors.items():
            assert file.rows(tensor, 0, tensor.num_rows).numpy().tobytes() == tensors[name][2]
        assert file.rows(file.tensors["q.weight"], 1, 2).numpy().tobytes() == raw[18:]


def test_a_file_of_150000_tokens_opens_in_a_blink(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(75_000)]
    path = files.write_file(tmp_path / "m.gguf", {**META, "a.tokens": words, "a.merges": words}, {})
    took = min(_timed(path) for _ in range(5))
    assert took < 0.5, "about 0.03 s on an idle machine"
    assert GgufFile(path).metadata["a.tokens"][-1] == "token74999"


def _timed(path: Path) -> float:
    start = time.perf_counter()
    GgufFile(path)
    return time.perf_counter() - start


@pytest.mark.parametrize("number", range(61))
def test_every_type_is_read_or_refused_with_the_tensors_name(number: int, tmp_path: Path) -> None:
    known = TYPES.get(number)
    shape = (256,) if known is None else (2, known.elements)
    raw = bytes(2 * known.num_bytes) if known else bytes(64)
    tensors = {
        "token_embd.weight": files.plain(torch.zeros(8, 4)),
        "blk.0.ffn_up.weight": (str(number), shape, raw),
    }
    path = files.write_file(tmp_path / "m.gguf", {**META, **LLAMA}, tensors)
    if known and (known.dtype or known.format):
        assert "model.layers.0.mlp.up_proj.weight" in set(open_checkpoint(path).source.names())
    else:
        with pytest.raises(WeightsError) as caught:
            open_checkpoint(path)
        assert caught.value.code == "unknown_weight_format"
        assert "blk.0.ffn_up.weight" in caught.value.message and "Q4_K_M" in caught.value.hint
        assert known is None or known.name in caught.value.message


LLAMA: Mapping[str, Any] = {
    "llama.block_count": 1, "llama.embedding_length": 4, "llama.attention.head_count": 1,
    "llama.context_length": 32, "llama.feed_forward_length": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def refusal(path: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    assert caught.value.hint
    return caught.value


def test_a_truncated_file_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    path = specimen(tmp_path, **{"two.weight": files.plain(torch.ones(64, 64))})
    path.write_bytes(path.read_bytes()[:-64])
    error = refusal(path)
    assert error.code == "truncated_shard" and "two.weight" in error.message


def test_a_file_cut_anywhere_is_refused_and_never_crashes(tmp_path: Path) -> None:
    path = specimen(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole) - 31):
        path.write_bytes(whole[:size])
        assert refusal(path).code in ("truncated_shard", "invalid_shard"), size


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(at=st.integers(0, 250), byte=st.integers(0, 255), wide=st.booleans())
def test_a_damaged_header_is_an_error_of_ours_or_still_a_file(
    at: int, byte: int, wide: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = specimen(tmp_path_factory.mktemp("damaged"))
    raw = bytearray(path.read_bytes())
    raw[at % len(raw) : at % len(raw) + (8 if wide else 1)] = bytes([byte]) * (8 if wide else 1)
    path.write_bytes(raw)
    try:
        file = GgufFile(path)
        _ = (
            [file.metadata[key] for key in file.metadata],
            [file.rows(t, 0, t.num_rows) for t in file.tensors.values()],
        )
    except WeightsError as error:
        assert error.hint and path.name in error.message


DAMAGES = {
    "not a gguf": ("invalid_shard", lambda raw: b"\x93NUMPY" + raw),
    "version 1": ("unsupported_container", lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:]),
    "big endian": ("unsupported_container", lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:]),
    "a billion keys": ("truncated_shard", lambda raw: raw[:16] + struct.pack("<Q", 1 << 60) + raw[24:]),
    "a billion tensors": ("truncated_shard", lambda raw: raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:]),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_no_gguf_of_ours_is_refused(what: str, tmp_path: Path) -> None:
    code, damage = DAMAGES[what]
    path = specimen(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(path).code in (code, "invalid_shard")


def test_rows_that_blocks_cant_make_up_are_refused(tmp_path: Path) -> None:
    error = refusal(specimen(tmp_path, odd=("Q4_0", (2, 33), bytes(36))))
    assert error.code == "invalid_shard" and "odd" in error.message


def test_tensors_that_overlap_or_come_twice_are_refused(tmp_path: Path) -> None:
    path = specimen(tmp_path, **{"two.weight": files.plain(torch.ones(2, 3))})
    raw = path.read_bytes()
    at = raw.index(b"two.weight") + len(b"two.weight") + 4 + 16 + 4
    path.write_bytes(raw[:at] + struct.pack("<Q", 0) + raw[at + 8 :])
    assert refusal(path).code == "invalid_shard" and "two.weight" in refusal(path).message
    path.write_bytes(raw.replace(b"two.weight", b"one.weight"))
    assert refusal(path).code == "duplicate_tensor"


def shards(path: Path, count: int = 3) -> list[Path]:
    tensors = {f"t{i}.weight": files.plain(torch.full((2, 2), float(i))) for i in range(7)}
    return files.write_split(path / "m", META, tensors, count)


def test_shards_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    for path in shards(tmp_path):
        model = GgufModel(path)
        assert model.name == "m" and model.metadata["a.text"] == "grüße" and len(model.tensors) == 7
        for i in range(7):
            tensor = model.tensors[f"t{i}.weight"]
            assert model.rows(tensor, 0, 2).view(torch.float32).tolist() == [[i, i], [i, i]]
    assert models_in(tmp_path) == [shards(tmp_path)[0]]


def test_missing_swapped_and_foreign_shards_are_refused(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    third = paths[2].read_bytes()
    paths[2].unlink()
    error = refusal(paths[0])
    assert error.code == "missing_shard" and paths[2].name in error.message
    paths[2].write_bytes(paths[1].read_bytes())
    error = refusal(paths[0])
    assert error.code == "invalid_shard" and paths[2].name in error.message
    paths[2].write_bytes(third.replace(b"t2.weight", b"t1.weight"))
    error = refusal(paths[0])
    assert error.code == "duplicate_tensor" and "t1.weight" in error.message
    alone = paths[1].rename(tmp_path / "alone.gguf")
    assert refusal(alone).code == "invalid_shard"


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"a\.gguf, b\.gguf"):
        for name in ("a", "b"):
            files.write_file(tmp_path / f"{name}.gguf", META, {})
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").unlink()
    files.write_file(tmp_path / "mmproj-a.gguf", {"general.architecture": "clip"}, {})
    error = refusal(tmp_path)
    assert error.code == "missing_tensor" and "a.gguf" in error.message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.context_length": "long"}, "context_length"),
        ({"llama.attention.head_count": [1, 2]}, "head_count"),
        ({"llama.attention.head_count": ["a"]}, "head_count"),
        ({"llama.attention.head_count": [float("nan")]}, "head_count"),
        ({"llama.expert_count": 8}, "Mixtral"),
        ({"llama.logit_scale": 8.0}, "logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.value_length": 8}, "different lengths"),
    ],
)
def test_a_header_that_is_no_model_of_ours_is_refused_by_its_key(
    change: Mapping[str, Any], word: str, tmp_path: Path
) -> None:
    metadata = {k: v for k, v in {**META, **LLAMA, **change}.items() if v is not None}
    path = files.write_file(
        tmp_path / "m.gguf", metadata, {"token_embd.weight": files.plain(torch.zeros(8, 4))}
    )
    error = refusal(path)
    assert error.code in ("invalid_model_config", "unknown_model_type") and word in error.message
