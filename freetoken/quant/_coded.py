"""Tiles of coded weights: codes, and what scales them, in streams that the native library reads alike.

A matrix [rows, K] in coded form is a mapping: `codes` uint8 [rows, K], one code a byte whatever its width,
and the format's parts, each [rows / part.rows, K / part.columns]. Blocks lie along K, the summed
dimension. Invariant: packing is lossless and `unpack` inverts it; code order is native/coded.h's.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import CodedMatrix, WeightFormat
from freetoken.core.units import align_up, ceil_div

_ALIGN = 64
GATE, UP, DOWN = "gate", "up", "down"


@dataclass(frozen=True)
class Part:
    """What scales codes: one value for rows x columns of a matrix; columns 0 = one for all of it."""

    name: str
    dtype: torch.dtype
    columns: int
    rows: int = 1


@dataclass(frozen=True)
class Stream:
    """A run of bytes in a tile: `matrix`'s codes (part None) or one of its parts, [height, width]."""

    matrix: str
    part: Part | None
    offset: int
    num_bytes: int
    height: int
    width: int


class CodedFormat(WeightFormat):
    """A format of `code_bits` with `parts`; subclasses say how codes and parts make numbers.

    words   rows hold codes as 16-bit words of which one digit spans 32 elements; False: bytes as they come
    error   largest |decode(encode(x)) - x| over the largest |x| of the matrix
    """

    code_bits = 4
    words = True
    parts: tuple[Part, ...] = ()
    columns_multiple = 32
    error = 0.0

    @abc.abstractmethod
    def encode(self, matrix: Tensor) -> CodedMatrix:
        """Code float [.., rows, K] with blocks along K."""

    @abc.abstractmethod
    def decode(self, coded: CodedMatrix) -> Tensor:
        """float32 [.., rows, K], exactly what the format says."""

    def refuse(self, coded: CodedMatrix) -> None:
        """WeightsError if a part holds anything but finite numbers."""
        for part in self.parts:
            if not bool(torch.isfinite(coded[part.name].float()).all()):
                raise not_finite(self.name, part.name)

    def tile_bytes(self, tile_width: int, hidden: int) -> int:
        last = list(self.streams(tile_width, hidden))[-1]
        return align_up(last.offset + last.num_bytes, _ALIGN)

    def streams(self, w: int, h: int) -> Iterator[Stream]:
        """The streams of a tile in order."""
        if w % self.block or h % self.columns_multiple:
            raise WeightsError(
                f"Experts of {h} x {w} columns can't be coded as {self.name}: it needs multiples of "
                f"{self.columns_multiple} and {self.block}.",
                code="invalid_expert_width",
                hint="Choose another weight format.",
            )
        at = 0
        row = self._row_bytes(h)
        for matrix, size, height in (
            (GATE, w * row, w),
            (UP, w * row, w),
            (DOWN, w * h * self.code_bits // 8, w),
        ):
            yield Stream(matrix, None, at, size, height, h)
            at += align_up(size, _ALIGN)
        for part in self.parts:
            item = part.dtype.itemsize
            if not part.columns:
                yield Stream("", part, at, 3 * item, 3, 1)
                at += align_up(3 * item, _ALIGN)
                continue
            for matrix in (GATE, UP, DOWN):
                tall, wide = (part.columns, part.rows) if matrix == DOWN else (part.rows, part.columns)
                height, width = ceil_div(w, tall), ceil_div(h, wide)
                yield Stream(matrix, part, at, height * width * item, height, width)
                at += align_up(height * width * item, _ALIGN)

    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        self.pack(self.encode(gate.float()), self.encode(up.float()), self.encode(down_t.t().float()), out)

    def pack_coded(
        self, matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix], tile: int, tile_width: int, out: Tensor
    ) -> None:
        gate, up, down = matrices
        a, b = tile * tile_width, (tile + 1) * tile_width
        self.pack(self._cut(gate, a, b, -2), self._cut(up, a, b, -2), self._cut(down, a, b, -1), out)

    def pack(self, gate: CodedMatrix, up: CodedMatrix, down: CodedMatrix, out: Tensor) -> None:
        """Write one tile: gate, up [w, H] and down [H, w] in coded form; `out` uint8 [tile_bytes]."""
        matrices = {GATE: gate, UP: up, DOWN: down}
        for coded in matrices.values():
            self.refuse(coded)
        out.zero_()
        w, h = gate["codes"].shape
        for one in self.streams(w, h):
            if one.part is None:
                body = self._pack_codes(one.matrix, matrices[one.matrix]["codes"])
            elif not one.part.columns:
                body = torch.stack([m[one.part.name].reshape(()) for m in matrices.values()])
            else:
                body = matrices[one.matrix][one.part.name]
                body = body.t() if one.matrix == DOWN else body
            raw = _whole(body).view(-1).view(torch.uint8)
            out[one.offset : one.offset + one.num_bytes] = raw

    def unpack(self, tiles: Tensor, w: int, h: int) -> tuple[CodedMatrix, CodedMatrix, CodedMatrix]:
        """uint8 [.., tile_bytes] back to gate, up [.., w, H] and down [.., H, w] in coded form."""
        found: dict[str, dict[str, Tensor]] = {GATE: {}, UP: {}, DOWN: {}}
        for one in self.streams(w, h):
            raw = tiles[..., one.offset : one.offset + one.num_bytes]
            if one.part is None:
                found[one.matrix]["codes"] = self._unpack_codes(one.matrix, raw, w, h)
                continue
            values = _whole(raw).view(one.part.dtype).unflatten(-1, (one.height, one.width))
            if not one.part.columns:
                for i, matrix in enumerate(found):
                    found[matrix][one.part.name] = values[..., i : i + 1, :]
            else:
                found[one.matrix][one.part.name] = values.mT if one.matrix == DOWN else values
        return found[GATE], found[UP], found[DOWN]

    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (self.decode(m) for m in self.unpack(tiles, tile_width, hidden))
        return gate, up, down.mT

    def _cut(self, coded: CodedMatrix, a: int, b: int, axis: int) -> CodedMatrix:
        """Rows (axis -2) or columns (axis -1) [a, b) with the scales that cover them."""
        out = {"codes": coded["codes"].narrow(axis, a, b - a)}
        for part in self.parts:
            span = part.rows if axis == -2 else part.columns
            value = coded[part.name]
            if part.columns:
                value = value.narrow(axis, a // span, ceil_div(b, span) - a // span)
            out[part.name] = value
        return out

    def _row_bytes(self, h: int) -> int:
        if not self.words:
            return h * self.code_bits // 8
        return ceil_div(h, 512 // self.code_bits) * 64

    def _pack_codes(self, matrix: str, codes: Tensor) -> Tensor:
        if matrix == DOWN:
            return self._down_words(codes.t())
        if not self.words:
            return codes
        digits = 16 // self.code_bits
        rows = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (32 * digits)))
        return _join(rows.unflatten(-1, (-1, digits, 32)).movedim(-2, 0), self.code_bits)

    def _down_words(self, codes: Tensor) -> Tensor:
        """[w, H] -> [w / 8, H] dwords (4 bits), [w / 2, H] words (8 bits), or the bytes themselves."""
        if not self.words:
            return codes
        digits = 16 // self.code_bits
        if digits == 2:
            return _join(codes.unflatten(0, (-1, 2)).movedim(1, 0), 8)
        pairs = codes.unflatten(0, (-1, digits, 2))  # [w / 8, q, low or high word, H]
        words = [_join(pairs[:, :, half].movedim(1, 0), 4) for half in (0, 1)]
        return torch.stack(words, -1)

    def _unpack_codes(self, matrix: str, raw: Tensor, w: int, h: int) -> Tensor:
        lead = raw.shape[:-1]
        if not self.words:
            codes = raw.reshape(*lead, w, h)
            return codes.mT if matrix == DOWN else codes
        digits = 16 // self.code_bits
        words = _whole(raw).view(torch.int16)
        if matrix != DOWN:
            split = _split(words.reshape(*lead, w, -1, 1, 32), self.code_bits)
            return split.reshape(*lead, w, -1)[..., :h]
        if digits == 2:
            codes = _split(words.reshape(*lead, w // 2, 1, h), 8).reshape(*lead, w, h)
        else:
            halves = words.reshape(*lead, w // 8, 1, h, 2)
            codes = _split(halves, 4, -3).movedim(-1, -2).reshape(*lead, w, h)
        return codes.mT


def _whole(x: Tensor) -> Tensor:
    """A copy with plain strides, which `contiguous` doesn't promise for axes of one."""
    return x.clone(memory_format=torch.contiguous_format)


def _join(digits: Tensor, bits: int) -> Tensor:
    """uint8 [n, ..] digits, lowest first -> int16 [..]."""
    word = torch.zeros(digits.shape[1:], dtype=torch.int32)
    for q in range(digits.shape[0]):
        word |= digits[q].int() << (bits * q)
    return word.to(torch.int16)


def _split(words: Tensor, bits: int, axis: int = -2) -> Tensor:
    """int16 words with an axis of one -> uint8 with the digits along that axis."""
    wide = words.int()
    mask = (1 << bits) - 1
    return torch.cat([(wide >> (bits * q)) & mask for q in range(16 // bits)], axis).to(torch.uint8)


def spread(scales: Tensor, like: Tensor, columns: int, rows: int = 1) -> Tensor:
    """Repeat block scales over the elements of `like`."""
    out = scales.repeat_interleave(columns, -1)[..., : like.shape[-1]]
    return out.repeat_interleave(rows, -2)[..., : like.shape[-2], :] if rows > 1 else out


def blocks_of(matrix: Tensor, size: int) -> Tensor:
    """[.., K] -> [.., K / size, size]."""
    return matrix.unflatten(-1, (-1, size))


def not_finite(name: str, what: str) -> WeightsError:
    return WeightsError(
        f"A {name} weight has a {what} that is not a finite number.",
        code="invalid_weights",
        hint="The checkpoint is damaged; fetch it again.",
    )
