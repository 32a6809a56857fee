"""The GGUF container: a header of typed metadata and tensor entries, then the tensors' blocks.

Reads a header through a mapping in one walk that keeps positions and decodes nothing it isn't asked for: a
vocabulary of 150,000 strings costs as many additions. Every tensor is checked against its type and the file's
size before one is read; a fault names the tensor. Bytes of tensors come from a `Files`. Knows no architecture
and no weight format.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.units import align_up
from freetoken.weights.files import Files
from freetoken.weights.gguf_types import TYPES, BlockType, type_name

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_AGAIN = "Copy or download this file again."
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_DIMS, _MOST_NAME, _MOST_ALIGNMENT = 4, 1 << 16, 1 << 20
_LEAST_ENTRY, _LEAST_KEY = 24, 13
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: shape [.., rows, K] as everybody writes it, offset in bytes of the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a run along the last axis."""
        return (self.shape[-1] if self.shape else 1) // self.type.elements * self.type.num_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class Metadata(Mapping[str, Any]):
    """A header's keys and values; strings and arrays are decoded when asked for."""

    def __init__(self) -> None:
        self._read: dict[str, Callable[[], Any]] = {}

    def add(self, key: str, read: Callable[[], Any]) -> None:
        self._read[key] = read

    def __getitem__(self, key: str) -> Any:
        return self._read[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


class GgufFile:
    """One file, opened: `metadata`, and `tensors` by name in the file's order.

    Raises WeightsError `invalid_shard`, `truncated_shard` or `unknown_weight_format`.

    files       where the tensors' bytes come from
    num_bytes   the size of the whole file, where only its beginning lies at `path`: enough for the header
    """

    def __init__(self, path: Path, files: Files | None = None, num_bytes: int | None = None) -> None:
        self.path = path
        self._files = files or Files()
        self.metadata = Metadata()
        self.tensors: dict[str, GgufTensor] = {}
        size = path.stat().st_size if num_bytes is None else num_bytes
        if path.stat().st_size == 0:
            raise self._fault("is empty", code="truncated_shard")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read_header(size)
        except (struct.error, IndexError, OverflowError) as error:
            raise self._fault("ends inside its header", code="truncated_shard") from error
        except UnicodeDecodeError as error:
            raise self._fault(f"holds a name that is no text: {error}", code="invalid_shard") from error

    def rows(self, tensor: GgufTensor, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, row_bytes]: a view of what `files` gives, a mapping or memory read into."""
        width, count = tensor.row_bytes, (stop - start) * tensor.row_bytes
        if not count:
            return torch.empty((stop - start, width), dtype=torch.uint8)
        return self._files.bytes_of(self.path, tensor.offset + start * width, count).view(-1, width)

    def _fault(self, what: str, *, code: str, hint: str = _AGAIN) -> WeightsError:
        return WeightsError(f"{self.path.name} {what}.", code=code, hint=hint)

    # --- the header ---------------------------------------------------------------------------

    def _read_header(self, size: int) -> None:
        data = self._map
        if data[:4] != _MAGIC:
            raise self._fault(
                "is not a GGUF file", code="invalid_shard", hint="Name a .gguf file or a model folder."
            )
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"is in GGUF version {version}; versions 2 and 3 are read"
            if swapped in _VERSIONS:
                what = "is a big-endian GGUF file; this machine reads little-endian ones"
            raise self._fault(
                what, code="unsupported_container", hint="Convert the model again, or fetch another file."
            )
        if num_tensors > size // _LEAST_ENTRY or num_keys > size // _LEAST_KEY:
            raise self._fault(
                f"has {size} bytes for {num_keys} keys and {num_tensors} tensors", code="truncated_shard"
            )
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at)
            if key in self.metadata:
                raise self._fault(f"has the key {key} twice", code="invalid_shard")
            at = self._read_value(key, at)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT or alignment % 8:
            raise self._fault(f"has an alignment of {alignment}", code="invalid_shard")
        found = []
        for _ in range(num_tensors):
            entry, at = self._read_entry(at)
            found.append(entry)
        self._place(found, align_up(at, alignment), alignment, size)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = _COUNT.unpack_from(self._map, at)
        if length > _MOST_NAME:
            raise self._fault(f"has a name of {length} bytes", code="invalid_shard")
        end = at + 8 + length
        if end > len(self._map):
            raise IndexError
        return self._map[at + 8 : end].decode(), end

    def _read_value(self, key: str, at: int) -> int:
        (kind,) = struct.unpack_from("<I", self._map, at)
        at += 4
        if kind in _SCALARS:
            (value,) = struct.unpack_from(_SCALARS[kind], self._map, at)
            self.metadata.add(key, lambda: value)
            return at + struct.calcsize(_SCALARS[kind])
        if kind == _STRING:
            end = self._skip_strings(at, 1)
            self.metadata.add(key, lambda: self._strings(at, 1)[0])
            return end
        if kind == _ARRAY:
            return self._read_array(key, at)
        raise self._fault(f"has a value of unknown kind {kind} at {key}", code="invalid_shard")

    def _read_array(self, key: str, at: int) -> int:
        kind, count = struct.unpack_from("<IQ", self._map, at)
        at += 12
        if count > len(self._map) - at:
            raise IndexError
        if kind == _STRING:
            end = self._skip_strings(at, count)
            self.metadata.add(key, lambda: self._strings(at, count))
            return end
        if kind not in _SCALARS:
            raise self._fault(f"has an array of unknown kind {kind} at {key}", code="invalid_shard")
        code = _SCALARS[kind][1]
        end = at + int(count) * struct.calcsize("<" + code)
        if end > len(self._map):
            raise IndexError
        self.metadata.add(key, lambda: list(struct.unpack_from(f"<{count}{code}", self._map, at)))
        return end

    def _skip_strings(self, at: int, count: int) -> int:
        read, data = _COUNT.unpack_from, self._map
        for _ in range(count):
            at += 8 + read(data, at)[0]
        if at > len(data):
            raise IndexError
        return at

    def _strings(self, at: int, count: int) -> list[str]:
        read, data, out = _COUNT.unpack_from, self._map, []
        for _ in range(count):
            end = at + 8 + read(data, at)[0]
            out.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        return out

    def _read_entry(self, at: int) -> tuple[GgufTensor, int]:
        """The next tensor's entry; its offset is still counted from the start of the data."""
        name, at = self._string(at)
        (num_dims,) = struct.unpack_from("<I", self._map, at)
        if num_dims > _MOST_DIMS:
            raise self._fault(f"has a tensor {name} of {num_dims} dimensions", code="invalid_shard")
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._map, at + 4)
        if kind not in TYPES:
            raise WeightsError(
                f"Tensor {name} in {self.path.name} is of {type_name(kind)}, whose blocks nobody here knows.",
                code="unknown_weight_format",
                hint="Fetch the model in another quantisation, for example Q4_K_M or Q8_0.",
            )
        entry = GgufTensor(name, TYPES[kind], tuple(reversed(dims)), offset)
        if dims and dims[0] % entry.type.elements:
            raise self._fault(
                f"has a tensor {name} with rows of {dims[0]}, which blocks of {entry.type.elements} "
                f"({entry.type.name}) can't make up",
                code="invalid_shard",
            )
        return entry, at + 4 + 8 * num_dims + 12

    def _place(self, entries: list[GgufTensor], start: int, alignment: int, size: int) -> None:
        """Check that the tensors lie in the file, each in bytes of its own."""
        end, last = start, ""
        for entry in sorted(entries, key=lambda e: e.offset):
            at = start + entry.offset
            if entry.name in self.tensors:
                raise self._fault(f"has the tensor {entry.name} twice", code="duplicate_tensor")
            if entry.offset % alignment or at < end:
                raise self._fault(
                    f"has the tensor {entry.name} at {at}, inside {last or 'a gap'}", code="invalid_shard"
                )
            end, last = at + entry.num_bytes, entry.name
            if end > size:
                raise self._fault(
                    f"is truncated: tensor {entry.name} ends at {end}, the file has {size} bytes",
                    code="truncated_shard",
                )
            self.tensors[entry.name] = GgufTensor(entry.name, entry.type, entry.shape, at)
