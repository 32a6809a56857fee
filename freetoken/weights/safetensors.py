"""The safetensors container: an 8-byte length, a JSON header, then the bytes of the tensors.

Owns the checks that a damaged file must fail before anything is served: header, offsets and file size
of every shard at opening, the index in both directions (`open_directory`). Tensors are views of a
private mapping of the file: reading is paging in, the file is never written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError, nearest
from freetoken.core.interfaces import WeightSource
from freetoken.core.log import logger
from freetoken.weights.files import Files

INDEX_NAME = "model.safetensors.index.json"
_log = logger("weights")
_MAX_HEADER = 100 << 20
_AGAIN = "Copy or download this file again."
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. offset in bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Parse and check a file's header: names to entries. WeightsError names the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise WeightsError(
                f"{path.name} is cut short or not a safetensors file: {size} bytes, header of {length}.",
                code="truncated_shard",
                hint=_AGAIN,
            )
        text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
        entries = {name: _entry(value, 8 + length) for name, value in raw.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path.name} has a damaged header: {error}.", code="invalid_shard", hint=_AGAIN
        ) from error
    end = max((e.offset + e.num_bytes for e in entries.values()), default=0)
    if end > size:
        raise WeightsError(
            f"{path.name} is truncated: its header promises {end} bytes, the file has {size}.",
            code="truncated_shard",
            hint=_AGAIN,
        )
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} occurs twice")
    return found


def _entry(value: Mapping[str, Any], data_start: int) -> TensorEntry:
    if value["dtype"] not in _DTYPES:
        raise ValueError(f"type {value['dtype']!r} is unknown")
    dtype = _DTYPES[value["dtype"]]
    shape = tuple(int(n) for n in value["shape"])
    start, stop = (int(n) for n in value["data_offsets"])
    if min(shape, default=1) < 0 or start < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {start}..{stop} don't fit shape {list(shape)} of {value['dtype']}")
    return TensorEntry(dtype, shape, data_start + start, stop - start)


class SafetensorsSource(WeightSource):
    """Tensors of one or several files under unique names; `files` says how their bytes come."""

    def __init__(self, paths: Iterable[Path], files: Files | None = None) -> None:
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        self._files = files or Files()
        for path in paths:
            for name, entry in read_header(path).items():
                if name in self._entries:
                    other = self._entries[name][0].name
                    raise WeightsError(
                        f"Tensor {name} is in both {other} and {path.name}.",
                        code="duplicate_tensor",
                        hint="Remove the file that doesn't belong to this checkpoint.",
                    )
                self._entries[name] = (path, entry)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def file_of(self, name: str) -> Path:
        return self._find(name)[0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name)[1].dtype

    def read(self, name: str) -> Tensor:
        path, entry = self._find(name)
        return self._view(path, entry.dtype, entry.shape, entry.offset)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        path, entry = self._find(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise IndexError(f"rows {start}..{stop} of {name} {list(entry.shape)}")
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        return self._view(
            path, entry.dtype, (stop - start, *entry.shape[1:]), entry.offset + start * row_bytes
        )

    def close(self) -> None:
        self._files.close()

    def _find(self, name: str) -> tuple[Path, TensorEntry]:
        if name not in self._entries:
            raise WeightsError(
                f"The checkpoint has no tensor {name}.",
                code="missing_tensor",
                hint=nearest(name, self._entries),
            )
        return self._entries[name]

    def _view(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        raw = self._files.bytes_of(path, offset, count)
        aligned = raw if offset % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(shape)


def open_directory(directory: Path, files: Files | None = None) -> SafetensorsSource:
    """Open the checkpoint in a directory: by its index if there is one, else all its files."""
    index = directory / INDEX_NAME
    present = sorted(directory.glob("*.safetensors"))
    if not index.exists():
        if not present:
            raise WeightsError(
                f"{directory} holds no .safetensors file.",
                code="no_weights",
                hint="Point --model at a directory with config.json and .safetensors files.",
            )
        if len(present) > 1:
            _log.warning("%s is missing; reading all %d files", INDEX_NAME, len(present))
        return SafetensorsSource(present, files)
    listed = _read_index(index)
    shards = sorted({directory / file for file in listed.values()})
    _check_present(index, shards)
    stray = sorted(set(present) - set(shards))
    if stray:
        _log.warning("not in %s, ignored: %s", INDEX_NAME, ", ".join(p.name for p in stray))
    source = SafetensorsSource(shards, files)
    _check_index(listed, source)
    return source


def _read_index(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_duplicates)["weight_map"]
        if not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path.name} can't be read: {error}.",
            code="invalid_index",
            hint="Copy it again, or remove it to read all .safetensors files of the directory.",
        ) from error
    outside = sorted({f for f in listed.values() if Path(f).name != f or f in ("", ".", "..")})
    if outside:
        raise WeightsError(
            f"{path.name} names files outside its directory: {', '.join(outside)}.",
            code="invalid_index",
            hint=_AGAIN,
        )
    return dict(listed)


def _check_present(index: Path, shards: list[Path]) -> None:
    missing = [p.name for p in shards if not p.is_file()]
    if missing:
        raise WeightsError(
            f"{index.name} lists {len(shards)} files; missing: {', '.join(missing)}.",
            code="missing_shard",
            hint=f"Copy or download them into {index.parent}.",
        )


def _check_index(listed: Mapping[str, str], source: SafetensorsSource) -> None:
    """Every listed name lies in its file, and every tensor is listed."""
    found = set(source.names())
    faults = [
        f"{name} is not in {file}"
        for name, file in sorted(listed.items())
        if name not in found or source.file_of(name).name != file
    ]
    faults += [f"{name} in {source.file_of(name).name} is not listed" for name in sorted(found - set(listed))]
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")
        raise WeightsError(
            f"{INDEX_NAME} and the files disagree: {shown}.",
            code="stale_index",
            hint="A file is of another version: download the checkpoint again, or remove the index.",
        )
