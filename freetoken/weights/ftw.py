"""The FTW container: dense tensors under canonical names, and experts as the bank's own records.

A `WeightSource` of the dense part; the records are no tensors and are read by `experts/loading`, at their
place in the index. Every tensor is checked against its checksum as it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError, nearest
from freetoken.core.weights import PACKED, CodedMatrix, WeightSource
from freetoken.weights import ftw_index
from freetoken.weights.files import Files, crc32
from freetoken.weights.ftw_index import Entry, Index

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e8m0fnu,
    )
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_ftw(directory: Path) -> bool:
    return (directory / ftw_index.INDEX_NAME).is_file()


class FtwSource(WeightSource):
    """Dense tensors of an FTW directory; opening it checks the index and the first block of every shard."""

    holds_records = True

    def __init__(self, directory: Path, files: Files) -> None:
        self.directory, self.files = directory, files
        self.index: Index = ftw_index.load(directory / ftw_index.INDEX_NAME)
        ftw_index.check_shards(self.index, directory)
        for name, entry in self.index.tensors.items():
            _check_entry(name, entry)

    def names(self) -> Iterable[str]:
        return self.index.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the numbers; what is coded decodes to float32."""
        entry = self._find(name)
        return torch.float32 if entry.coding else DTYPES[entry.dtype]

    def read(self, name: str) -> Tensor:
        entry = self._plain(name)
        return self._whole(name, entry).view(DTYPES[entry.dtype]).view(entry.shape)

    def coding(self, name: str) -> str:
        return self._find(name).coding

    def packs(self, name: str) -> bool:
        return bool(self._find(name).coding)

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        """The matrix as it is multiplied; there are no stacks, so no `index`."""
        entry = self._find(name)
        shape = torch.empty(entry.shape, dtype=torch.uint8, device="meta")
        return {PACKED: self._whole(name, entry), "codes": shape}

    def stored_bytes(self, name: str) -> int:
        return self._find(name).num_bytes

    def _whole(self, name: str, entry: Entry) -> Tensor:
        raw = self._bytes(entry, 0, entry.num_bytes)
        if crc32(raw) != entry.crc:
            raise damaged(f"Tensor {name}", self.index.shards[entry.shard].file)
        return raw

    def _plain(self, name: str) -> Entry:
        entry = self._find(name)
        if entry.coding:
            raise TypeError(f"{name} is coded")
        return entry

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        entry = self._plain(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise IndexError(f"rows {start}..{stop} of {name} {list(entry.shape)}")
        row = entry.num_bytes // max(entry.shape[0], 1)
        raw = self._bytes(entry, start * row, (stop - start) * row)
        return raw.view(DTYPES[entry.dtype]).view(stop - start, *entry.shape[1:])

    def close(self) -> None:
        self.files.close()

    def _bytes(self, entry: Entry, start: int, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        path = self.directory / self.index.shards[entry.shard].file
        return self.files.bytes_of(path, entry.offset + start, num_bytes)

    def _find(self, name: str) -> Entry:
        if name not in self.index.tensors:
            raise WeightsError(
                f"The checkpoint has no tensor {name}.",
                code="missing_tensor",
                hint=nearest(name, self.index.tensors),
            )
        return self.index.tensors[name]


def damaged(what: str, file: str) -> WeightsError:
    return WeightsError(
        f"{what} in {file} does not have the checksum it was written with.",
        code="damaged_weights",
        hint="Copy the file again, or write the directory anew with ft checkpoint; `ft checkpoint verify` "
        "lists all that is damaged.",
    )


def _check_entry(name: str, entry: Entry) -> None:
    if entry.coding:  # what its bytes should be is the format's to say
        if len(entry.shape) != 2 or min(entry.shape) < 1:
            raise ftw_index.damaged(f"coded tensor {name} is no matrix: {list(entry.shape)}")
        return
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
        what = f"tensor {name} of {entry.dtype} {list(entry.shape)}"
        raise ftw_index.damaged(f"{what} can't have {entry.num_bytes} bytes")
