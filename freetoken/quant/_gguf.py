"""Blocks of GGUF files as a list of fields, read and written by the same list.

A block is a run of bytes for `columns` numbers of a row. Each field says which bytes it is and what it
holds: numbers as they lie (`Raw`), or digits of a few bits (`Digits`), several fields adding bits to one
array. Knows no file: rows of blocks come as uint8 tensors. Invariant: writing what was read gives the same
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import CodedFormat


class Field(Protocol):
    """A part of each block."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        """Take uint8 [.., blocks, num_bytes] into arrays [.., blocks, per block]."""

    def write(self, arrays: CodedMatrix) -> Tensor:
        """The inverse."""


@dataclass(frozen=True)
class Raw:
    """Numbers of a dtype, one after the other."""

    into: str
    num_bytes: int
    dtype: torch.dtype

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        out[self.into] = raw.contiguous().view(self.dtype)

    def write(self, arrays: CodedMatrix) -> Tensor:
        return arrays[self.into].contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Digits:
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


@dataclass(frozen=True)
class SixBits:
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


class GgufFormat(CodedFormat):
    """A coded format that GGUF files hold as blocks of `fields`, each for `gguf_columns` numbers of a row."""

    fields: tuple[Field, ...]

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
