"""Contracts of weights: where tensors are read from, how they are coded, who takes experts.

A container and its dialects offer a `WeightSource` and say for each matrix which format codes it; a file
of `quant/` says what the codes mean; the bank lays them out. Invariant: codes travel unchanged from the
checkpoint to the record, and whoever needs numbers asks the format to decode.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from freetoken.core.codes import Matrix

CodedMatrix = Mapping[str, Tensor]
"""A matrix in a format's own codes: `codes` uint8 [rows, K], and by name whatever scales them."""
Biases = tuple[Tensor, Tensor, Tensor]
"""An expert's biases of gate [I], up [I] and down [H]."""


BLOCKS = "blocks"
"""The key of a matrix that is still coded as a GGUF file has it: uint8 [rows, bytes].

Beside it, `codes` is a meta tensor: only its shape is true.
"""
PACKED = "packed"
"""The key of a matrix as `pack_matrix` writes it, uint8 [matrix_bytes]; `codes` as beside BLOCKS."""


class Lies(NamedTuple):
    """How a stored tensor holds a part of a matrix [rows, columns].

    part     `codes`, or what a dialect calls what scales them; EIGHTS and SORTED hold nothing: they promise
             that all numbers are 8, or that columns lie by group
    packing  PLAIN; NIBBLES: two numbers a byte along a row, the low one first; FIELDS: words of a column of
             eight rows, lowest first; SHUFFLED: the same, even rows first
    turned   the tensor is [columns, rows]; of NIBBLES, words of eight neighbours of a row are its numbers
    less     what was subtracted from each number
    inverse  of the number that is meant
    """

    part: str
    packing: str = ""
    turned: bool = False
    less: int = 0
    inverse: bool = False


PLAIN, NIBBLES, FIELDS, SHUFFLED = "", "nibbles", "fields", "shuffled"
EIGHTS, SORTED = "eights", "sorted"


class Stored(NamedTuple):
    """A tensor as it lies in a file."""

    lies: Lies
    dtype: torch.dtype
    num_bytes: int
    path: Path
    offset: int


class Fetched(NamedTuple):
    """Addresses of stored tensors in `memory`, which holds them."""

    addresses: list[int]
    memory: Tensor


Lay = Callable[[Sequence[int], int, int], bool]
"""(addresses of stored tensors, address of the first tile, bytes from tile to tile) -> whether it is done."""


class WeightSource(abc.ABC):
    """Named tensors of a checkpoint, read on demand; safe from many threads.

    holds_records   routed experts are no tensors here, but records for the bank
    owned           what `read` gives is the caller's own memory, not a view of a file
    """

    holds_records: bool = False
    owned: bool = False

    @abc.abstractmethod
    def names(self) -> Iterable[str]: ...

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def dtype(self, name: str) -> torch.dtype: ...

    @abc.abstractmethod
    def read(self, name: str) -> Tensor:
        """The whole tensor, in host memory, as stored. Plain tensors only."""

    @abc.abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis without reading the rest. Plain tensors only."""

    def coding(self, name: str) -> str:
        """The weight format that a matrix is coded in (`shape` is the matrix's own); empty: plain numbers."""
        return ""

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        """A coded matrix in its format's own codes; of a stack [n, rows, K] the `index`-th, if given."""
        raise NotImplementedError(f"{name} is not coded")

    def stored(self, name: str, index: int | None = None) -> tuple[Stored, ...]:
        """Of what a tensor or coded matrix consists, or the `index`-th of a stack; empty: reading tells."""
        return ()

    def fetch(self, some: Sequence[Stored]) -> Fetched | None:
        """Read them in one go, for a thread that reads into memory of its own; None: not here."""
        return None

    def packs(self, name: str) -> bool:
        """Whether `read_coded` gives the matrix PACKED."""
        return False

    def columns(self, name: str) -> Tensor | None:
        """int64 [K]: stored column j of a coded matrix meets input columns[j]; None = in order."""
        return None

    def stored_bytes(self, name: str) -> int:
        """Bytes that the tensor takes on disk, scales included."""
        return int(math.prod(self.shape(name)) * self.dtype(name).itemsize)

    @abc.abstractmethod
    def close(self) -> None: ...


class WeightFormat(abc.ABC):
    """How the weights of an expert tile are coded. One file of `quant/` each, stateless.

    A tile holds gate [w, H], up [w, H] and down transposed [w, H] for w of the expert's I columns.
    """

    name: str
    block: int = 1
    """Tile widths are multiples of this."""
    gguf_type: int = -1
    """The type's number in GGUF files; -1 = not a GGUF type."""
    gguf_columns: int = 1
    """Numbers in a GGUF block, whose bytes are `gguf_bytes`."""

    @property
    def gguf_bytes(self) -> int:
        return 0

    def detects(self, dtype: torch.dtype) -> bool:
        """True if experts stored as plain tensors of `dtype` are this format."""
        return False

    def from_gguf(self, raw: Tensor) -> CodedMatrix:
        """Rows as a GGUF file holds them, uint8 [.., rows, bytes], as codes. Lossless."""
        raise NotImplementedError(f"{self.name} has no codes")

    def dequantise(self, raw: Tensor) -> Tensor:
        """Rows as a GGUF file holds them, uint8 [.., rows, bytes], as float32 [.., rows, K]."""
        raise NotImplementedError(f"{self.name} is no GGUF type")

    @abc.abstractmethod
    def tile_bytes(self, tile_width: int, hidden: int) -> int: ...

    @abc.abstractmethod
    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        """Write three [w, H] tensors as the bytes of one tile; `out` uint8 [tile_bytes]."""

    def pack_tiles(self, gate: Tensor, up: Tensor, down_t: Tensor, tile_width: int, out: Tensor) -> None:
        """Write three [I, H] tensors as all tiles of an expert; `out` uint8 [T, at least tile_bytes]."""
        size = self.tile_bytes(tile_width, gate.shape[1])
        for tile, row in enumerate(out):
            cut = slice(tile * tile_width, (tile + 1) * tile_width)
            self.pack_tile(gate[cut], up[cut], down_t[cut], row[:size])

    def pack_coded(
        self, matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix], tile_width: int, out: Tensor
    ) -> None:
        """Write all tiles of an expert in codes: gate, up [I, H] and down [H, I]; `out` uint8 [T, bytes]."""
        raise NotImplementedError(f"{self.name} has no codes")

    def laying(
        self,
        shape: tuple[int, int],
        tile_width: int,
        stored: Sequence[Sequence[Stored]],
        *,
        alternating: bool = False,
    ) -> Lay | None:
        """How `pack_coded` is done at once, for H and I and what gate, up and down consist of.

        Two of them: gate and up are one, whose rows alternate, or lie one below the other. None: it isn't.
        What it refuses to lay is left to `refuse` and `pack_coded`, which say why.
        """
        return None

    def adopt(self, stored: CodedMatrix) -> CodedMatrix:
        """A matrix with the parts of a checkpoint's dialect (`scales`, `zeros`) as the format keeps it."""
        return stored

    def decode(self, coded: CodedMatrix) -> Tensor:
        """float32 [.., rows, K], exactly what the format says."""
        raise NotImplementedError(f"{self.name} has no codes")

    def refuse(self, coded: CodedMatrix) -> None:
        """WeightsError if codes or scales hold anything but finite numbers."""

    @abc.abstractmethod
    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decode uint8 [..., tile_bytes] to gate, up, down_t, each [..., w, H]; views where possible."""

    def device_code(self, tile_width: int, hidden: int) -> tuple[Matrix, ...]:
        """How gate, up and down lie in a tile and what they mean; empty: plain numbers, or devices can't."""
        return ()

    # One matrix alone, as a dense layer has it: the tile of gate without up and down, all rows in one.

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix in codes; 0: the format has no such form."""
        return 0

    def pack_matrix(self, coded: CodedMatrix, out: Tensor) -> None:
        """Write a matrix [rows, K]; `out` uint8 [matrix_bytes]."""
        raise NotImplementedError(f"{self.name} has no codes")

    def unpack_matrix(self, packed: Tensor, shape: tuple[int, int]) -> CodedMatrix:
        """The inverse of `pack_matrix`."""
        raise NotImplementedError(f"{self.name} has no codes")

    def below(self, packed: Sequence[Tensor], rows: Sequence[int], columns: int) -> Tensor:
        """Packed matrices of a format whose scales span no rows, one below the other, packed."""
        raise NotImplementedError(f"{self.name} has no codes")

    def matrix_rows(self, packed: Tensor, shape: tuple[int, int], rows: Tensor) -> Tensor:
        """float32 [n, K]: rows int64 [n] of a packed matrix of that shape, decoded."""
        raise NotImplementedError(f"{self.name} has no codes")


@dataclass(frozen=True)
class CodedWeight:
    """A dense layer's matrix in its format's codes.

    packed   uint8 [fmt.matrix_bytes(*shape)]
    columns  int64 [K]: column j of it meets input columns[j]; None = in order
    """

    fmt: WeightFormat
    packed: Tensor
    shape: tuple[int, int]
    columns: Tensor | None = None

    def decode(self, rows: Tensor) -> Tensor:
        """float32 [n, K]: rows int64 [n], columns as they lie."""
        return self.fmt.matrix_rows(self.packed, self.shape, rows)


class ExpertSink(abc.ABC):
    """Receives experts in any order; the bank implements it."""

    @abc.abstractmethod
    def put(
        self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor, biases: Biases | None = None
    ) -> None:
        """gate, up [I, H] and down [H, I] as stored, 16-bit or float32; biases likewise."""

    def codes(self, layer: int) -> str:
        """The format whose codes `put_coded` takes for this layer; empty: none, plain numbers only."""
        return ""

    def put_coded(
        self,
        layer: int,
        expert: int,
        matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix],
        biases: Biases | None = None,
    ) -> None:
        """gate, up [I, H] and down [H, I] in the codes of `codes(layer)`."""
        raise NotImplementedError("this sink takes plain numbers")

    def put_stored(
        self,
        layer: int,
        expert: int,
        source: WeightSource,
        names: Sequence[str],
        biases: Biases | None = None,
        *,
        alternating: bool = False,
    ) -> bool:
        """Take gate, up and down in the codes of `codes(layer)` as they lie in files, without looking at them
        one by one; False if that can't be or a number is none: then `put_coded` takes them, or refuses.

        Two names are stacks of all experts, the first of gate and up, whose rows alternate, or lie one below
        the other.
        """
        return False

    def defer(self, layer: int, expert: int, fill: Callable[[ExpertSink], None]) -> None:
        """Call `fill(sink)` now or later, in whatever thread; it reads one expert and puts it."""
        fill(self)
