"""The safetensors container: an 8-byte length, a JSON header, then the bytes of the tensors.

Owns the checks that a damaged file must fail before anything is served: header, offsets and file size
of every shard at opening, the index in both directions (`open_directory`). Tensors are views of a
private mapping of the file: reading is paging in, the file is never written. Headers of tens of thousands
of tensors are decoded by msgspec into a fixed form; one that is not quite of that form is parsed again,
slowly, by the code that says what is wrong with it.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from freetoken.core.errors import WeightsError, nearest
from freetoken.core.interfaces import WeightSource
from freetoken.core.log import logger
from freetoken.core.weights import Fetched, Lies, Stored
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


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_PLAIN = Lies("")
_METADATA = "__metadata__"
_FIELDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor lies. offset in bytes from the start of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Stored(msgspec.Struct, gc=False):
    """An entry as the header has it; an empty one stands for what has none of this, as the metadata."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (-1, -1)


class _Listing(msgspec.Struct, gc=False):
    weight_map: msgspec.Raw


_STORED = msgspec.json.Decoder(dict[str, _Stored])
_LISTING = msgspec.json.Decoder(_Listing)
_WEIGHT_MAP = msgspec.json.Decoder(dict[str, str])


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
        entries = _decoded(text, path, 8 + length) or _parsed(text, path, 8 + length)
    except _DAMAGE as error:
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


def _decoded(text: bytes, path: Path, data_start: int) -> dict[str, TensorEntry] | None:
    """The entries of a header in which everything is as the standard writer puts it; None for any other."""
    try:
        stored = _STORED.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    stored.pop(_METADATA, None)
    # Of a name or field that is given twice only one is left here; escapes could hide one from counting.
    if b"\\" in text or any(text.count(field) != len(stored) for field in _FIELDS):
        return None
    entries = {}
    for name, one in stored.items():
        start, stop = one.data_offsets
        dtype, size = _size(one.dtype, one.shape)
        if start < 0 or stop - start != size:
            return None
        entries[name] = TensorEntry(path, dtype, one.shape, data_start + start, size)
    return entries


def _parsed(text: bytes, path: Path, data_start: int) -> dict[str, TensorEntry]:
    """The entries of any header; one of _DAMAGE says what is wrong."""
    raw = json.loads(text, object_pairs_hook=_no_duplicates)
    return {name: _entry(value, path, data_start) for name, value in raw.items() if name != _METADATA}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{', '.join(twice)} occurs twice")
    return found


def _entry(value: Mapping[str, Any], path: Path, data_start: int) -> TensorEntry:
    kind = value["dtype"]
    if kind not in _DTYPES:
        raise ValueError(f"type {kind!r} is unknown")
    shape = tuple(int(n) for n in value["shape"])
    start, stop = (int(n) for n in value["data_offsets"])
    dtype, size = _size(kind, shape)
    if start < 0 or stop - start != size:
        raise ValueError(f"offsets {start}..{stop} don't fit shape {list(shape)} of {kind}")
    return TensorEntry(path, dtype, shape, data_start + start, size)


@functools.lru_cache(4096)  # a checkpoint has tens of thousands of tensors of few shapes
def _size(kind: str, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
    """A type and the bytes of a tensor; of one that can't be, a size that no offsets fit."""
    dtype = _DTYPES.get(kind, torch.uint8)
    possible = kind in _DTYPES and min(shape, default=1) >= 0
    return dtype, math.prod(shape) * dtype.itemsize if possible else -1


class SafetensorsSource(WeightSource):
    """Tensors of one or several files under unique names; `files` says how their bytes come.

    headers   what each file holds
    """

    def __init__(self, paths: Iterable[Path], files: Files | None = None) -> None:
        self.headers = {path: read_header(path) for path in paths}
        self._entries: dict[str, TensorEntry] = {}
        self._files = files or Files()
        for path, header in self.headers.items():
            for name in sorted(header.keys() & self._entries.keys()):
                raise WeightsError(
                    f"Tensor {name} is in both {self._entries[name].path.name} and {path.name}.",
                    code="duplicate_tensor",
                    hint="Remove the file that doesn't belong to this checkpoint.",
                )
            self._entries |= header

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).dtype

    def read(self, name: str) -> Tensor:
        entry = self._find(name)
        return self._view(entry, entry.shape, entry.offset)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        entry = self._find(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise IndexError(f"rows {start}..{stop} of {name} {list(entry.shape)}")
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        return self._view(entry, (stop - start, *entry.shape[1:]), entry.offset + start * row_bytes)

    def stored(self, name: str, index: int | None = None) -> tuple[Stored, ...]:
        e = self._find(name)
        if index is None:
            return (Stored(_PLAIN, e.dtype, e.num_bytes, e.path, e.offset),)
        if not e.shape or not 0 <= index < e.shape[0]:
            raise IndexError(f"{index} of {name} {list(e.shape)}")
        size = e.num_bytes // e.shape[0]
        return (Stored(_PLAIN, e.dtype, size, e.path, e.offset + index * size),)

    def fetch(self, some: Sequence[Stored]) -> Fetched | None:
        return self._files.fetch(some)

    def close(self) -> None:
        self._files.close()

    def _find(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise WeightsError(
                f"The checkpoint has no tensor {name}.",
                code="missing_tensor",
                hint=nearest(name, self._entries),
            )
        return self._entries[name]

    def _view(self, entry: TensorEntry, shape: tuple[int, ...], offset: int) -> Tensor:
        count = math.prod(shape) * entry.dtype.itemsize
        if count == 0:
            return torch.empty(shape, dtype=entry.dtype)
        raw = self._files.bytes_of(entry.path, offset, count)
        aligned = raw if offset % entry.dtype.itemsize == 0 else raw.clone()
        return aligned.view(entry.dtype).view(shape)


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
    shards = sorted(directory / file for file in set(listed.values()))
    _check_present(index, shards)
    stray = sorted(set(present) - set(shards))
    if stray:
        _log.warning("not in %s, ignored: %s", INDEX_NAME, ", ".join(p.name for p in stray))
    source = SafetensorsSource(shards, files)
    _check_index(listed, source)
    return source


def _read_index(path: Path) -> dict[str, str]:
    try:
        text = path.read_bytes()
        listed = _mapped(text) or json.loads(text, object_pairs_hook=_no_duplicates)["weight_map"]
        if not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("weight_map must map names to files")
    except (*_DAMAGE, OSError) as error:
        raise WeightsError(
            f"{path.name} can't be read: {error}.",
            code="invalid_index",
            hint="Copy it again, or remove it to read all .safetensors files of the directory.",
        ) from error
    outside = sorted({f for f in set(listed.values()) if Path(f).name != f or f in ("", ".", "..")})
    if outside:
        raise WeightsError(
            f"{path.name} names files outside its directory: {', '.join(outside)}.",
            code="invalid_index",
            hint=_AGAIN,
        )
    return dict(listed)


def _mapped(text: bytes) -> dict[str, str] | None:
    """weight_map of an index in which everything is as the standard writer puts it; None for any other."""
    try:
        raw = bytes(_LISTING.decode(text).weight_map)
        listed = _WEIGHT_MAP.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # Of a name that is given twice only one is left here; escapes could hide one from counting.
    plain = b"\\" not in text and text.count(b'"weight_map"') == 1 and raw.count(b'"') == 4 * len(listed)
    return listed if plain else None


def _check_present(index: Path, shards: list[Path]) -> None:
    missing = [p.name for p in shards if not os.path.isfile(p)]  # Path raises for names too long
    if missing:
        raise WeightsError(
            f"{index.name} lists {len(shards)} files; missing: {', '.join(missing)}.",
            code="missing_shard",
            hint=f"Copy or download them into {index.parent}.",
        )


def _check_index(listed: Mapping[str, str], source: SafetensorsSource) -> None:
    """Every listed name lies in its file, and every tensor is listed."""
    by_file: dict[str, list[str]] = {path.name: [] for path in source.headers}
    for name, file in listed.items():
        by_file[file].append(name)
    if all(header.keys() == set(by_file[path.name]) for path, header in source.headers.items()):
        return
    absent = {name: listed[name] for name in listed.keys() - set(source.names())}
    stray = []
    for path, header in source.headers.items():
        file = path.name
        for name in header:
            said = listed.get(name)
            if said is None:
                stray.append(f"{name} in {file} is not listed")
            elif said != file:
                absent[name] = said
    faults = [f"{name} is not in {file}" for name, file in sorted(absent.items())] + sorted(stray)
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")
        raise WeightsError(
            f"{INDEX_NAME} and the files disagree: {shown}.",
            code="stale_index",
            hint="A file is of another version: download the checkpoint again, or remove the index.",
        )
