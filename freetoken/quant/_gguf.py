"""Blocks of GGUF files as a list of fields, read and written by the same list.

A block is a run of bytes for `columns` numbers of a row. Each field says which bytes it is and what it
holds: numbers as they lie (`Raw`), or digits of a few bits (`Digits`), several fields adding bits to one
array. Knows no file: rows of blocks come as uint8 tensors. Where the native library is there, it cuts
blocks into tiles without making codes of them first. Invariants: writing what was read gives the same
bytes; both ways into a tile write the same ones.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import BLOCKS, CodedMatrix
from freetoken.native import unblock
from freetoken.quant._coded import DOWN, CodedFormat, not_finite


class Field(abc.ABC):
    """A part of each block: `num_bytes` of it."""

    num_bytes: int

    @abc.abstractmethod
    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        """Take uint8 [.., blocks, num_bytes] into arrays [.., blocks, per block]."""

    @abc.abstractmethod
    def write(self, arrays: CodedMatrix) -> Tensor:
        """The inverse."""

    def describe(self, places: Mapping[str, int]) -> unblock.Field | None:
        """The same for the native library, arrays by their numbers; None if it can't."""
        return None


@dataclass(frozen=True)
class Raw(Field):
    """Numbers of a dtype, one after the other."""

    into: str
    num_bytes: int
    dtype: torch.dtype

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        out[self.into] = raw.contiguous().view(self.dtype)

    def write(self, arrays: CodedMatrix) -> Tensor:
        return arrays[self.into].contiguous().view(torch.uint8)

    def describe(self, places: Mapping[str, int]) -> unblock.Field | None:
        at = places.get(self.into)
        return None if at is None else unblock.Field(at, unblock.RAW, 8, 0, self.num_bytes, 0)


@dataclass(frozen=True)
class Digits(Field):
    """Digits of `bits`, going to bits `at` and up of their numbers.

    `run` bytes hold 8 / bits runs of numbers: their lowest digits are the first run, and so on.
    """

    into: str
    num_bytes: int
    bits: int
    run: int = 1
    at: int = 0

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        runs = raw.unflatten(-1, (-1, self.run))
        mask = (1 << self.bits) - 1
        digits = [(runs >> shift & mask) << self.at for shift in range(0, 8, self.bits)]
        numbers = torch.stack(digits, -2).flatten(-3)
        out[self.into] = out[self.into] | numbers if self.into in out else numbers

    def write(self, arrays: CodedMatrix) -> Tensor:
        digits = arrays[self.into] >> self.at & (1 << self.bits) - 1
        runs = digits.unflatten(-1, (-1, 8 // self.bits, self.run)).unbind(-2)
        raw = runs[0]
        for i, more in enumerate(runs[1:], 1):
            raw = raw | more << self.bits * i
        return raw.flatten(-2)

    def describe(self, places: Mapping[str, int]) -> unblock.Field | None:
        at = places.get(self.into)
        if at is None:
            return None
        return unblock.Field(at, unblock.DIGITS, self.bits, self.at, self.num_bytes, self.run)


@dataclass(frozen=True)
class SixBits(Field):
    """The twelve bytes of Q4_K and Q5_K: eight six-bit scales `sc`, eight six-bit minima `mn`."""

    num_bytes: int = 12

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        a, b, c = raw[..., :4], raw[..., 4:8], raw[..., 8:]
        out["sc"] = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
        out["mn"] = torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)

    def write(self, arrays: CodedMatrix) -> Tensor:
        sc, mn = arrays["sc"], arrays["mn"]
        a, b = sc[..., :4] & 63 | sc[..., 4:] >> 4 << 6, mn[..., :4] & 63 | mn[..., 4:] >> 4 << 6
        return torch.cat([a, b, sc[..., 4:] & 15 | mn[..., 4:] << 4], -1)

    def describe(self, places: Mapping[str, int]) -> unblock.Field | None:
        sc, mn = places["sc"], places["mn"]
        return unblock.Field(sc, unblock.SIX_BITS, 6, 0, self.num_bytes, 0) if mn == sc + 1 else None


class GgufFormat(CodedFormat):
    """A coded format that GGUF files hold as blocks of `fields`, each for `gguf_columns` numbers of a row.

    exponents   the part whose 255 means no number, if it holds powers of two
    """

    fields: tuple[Field, ...]
    exponents = ""

    @property
    def gguf_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields)

    def from_gguf(self, raw: Tensor) -> CodedMatrix:
        if raw.shape[-1] % self.gguf_bytes:
            raise WeightsError(
                f"A row of {raw.shape[-1]} bytes is no row of {self.name} blocks of {self.gguf_bytes}.",
                code="invalid_tensor_shape",
                hint="The file is damaged; fetch it again.",
            )
        blocks = raw.unflatten(-1, (-1, self.gguf_bytes))
        out: dict[str, Tensor] = {}
        for field, part in zip(
            self.fields, blocks.split([f.num_bytes for f in self.fields], -1), strict=True
        ):
            field.read(part, out)
        return {name: numbers.flatten(-2) for name, numbers in out.items()}

    def to_gguf(self, coded: CodedMatrix) -> Tensor:
        num = coded["codes"].shape[-1] // self.gguf_columns
        arrays = {name: numbers.unflatten(-1, (num, -1)) for name, numbers in coded.items()}
        return torch.cat([field.write(arrays) for field in self.fields], -1).flatten(-2)

    def dequantise(self, raw: Tensor) -> Tensor:
        return self.decode(self.from_gguf(raw))

    @functools.cached_property
    def blocks(self) -> unblock.Blocks | None:
        """The format as the native library takes it apart; None if it can't."""
        places = {"codes": 0, **{part.name: i + 1 for i, part in enumerate(self.tile_parts)}}
        if not unblock.available() or any(part.rows != 1 for part in self.tile_parts):
            return None
        fields = [field.describe(places) for field in self.fields]
        known = [field for field in fields if field is not None]
        checks = {torch.float16: unblock.HALF}
        parts = [
            (
                p.dtype.itemsize,
                p.columns,
                unblock.E8M0 if p.name == self.exponents else checks.get(p.dtype, 0),
            )
            for p in self.tile_parts
        ]
        shape = (self.gguf_columns, self.gguf_bytes, int(self.words))
        return unblock.blocks_of(known, self.planes, parts, shape) if len(known) == len(fields) else None

    def pack_some(self, matrices: Mapping[str, CodedMatrix], w: int, tiles: Tensor) -> None:
        if self.blocks is None or any(BLOCKS not in m for m in matrices.values()):
            given = {n: self.from_gguf(m[BLOCKS]) if BLOCKS in m else m for n, m in matrices.items()}
            return super().pack_some(given, w, tiles)
        tiles.zero_()  # between streams
        hidden = next(m["codes"].shape[-2 if name == DOWN else -1] for name, m in matrices.items())
        streams = list(self.streams(w, hidden, tuple(matrices)))
        for matrix, coded in matrices.items():
            raw = coded[BLOCKS]
            places = [tiles.data_ptr() + s.offset for s in streams if s.matrix == matrix]
            lying = unblock.Lying(raw.data_ptr(), raw.stride(0), hidden, w, len(tiles))
            if not unblock.unblock(self.blocks, lying, places, tiles.stride(0), down=matrix == DOWN):
                raise not_finite(self.name, "factor")
