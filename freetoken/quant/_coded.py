"""Tiles of coded weights: codes, and what scales them, in streams that the native library reads alike.

A matrix [rows, K] in coded form is a mapping: `codes` uint8 [rows, K], one code a byte whatever its width,
and the format's parts, each [rows / part.rows, K / part.columns]. Blocks lie along K, the summed
dimension. Codes of odd widths lie in planes: a plane holds some bits of every code. Invariant: packing is
lossless and `unpack` inverts it; code order is native/coded.h's.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.codes import Matrix, Scale
from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import CodedMatrix
from freetoken.core.units import align_up, ceil_div
from freetoken.native import unblock
from freetoken.quant._laying import DOWN as DOWN
from freetoken.quant._laying import GATE as GATE
from freetoken.quant._laying import MATRICES as MATRICES
from freetoken.quant._laying import UP as UP
from freetoken.quant._laying import LaidFormat, Stream
from freetoken.quant._laying import Part as Part

ALL = 1 << 30
"""Columns of a part whose value is for a whole row."""
_ALIGN = 64
_KINDS = {
    torch.float16: "f16",
    torch.float32: "f32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "e4m3",
}


@dataclass(frozen=True)
class Meaning:
    """What a device has to know: the level that a code is, and the parts whose products are step and least.

    level, zero, sign   as in core.codes.Matrix
    step, least         names of parts; `part:kind` where a number isn't what the part's dtype says
    """

    level: str
    step: tuple[str, ...]
    least: tuple[str, ...] = ()
    zero: int = 0
    sign: int = 1


class CodedFormat(LaidFormat):
    """Codes and `parts`; subclasses say how they make numbers.

    error   largest |decode(encode(x)) - x| over the largest |x| of the matrix
    meaning the same as `decode`, for devices; None: they can't
    """

    columns_multiple = 32
    error = 0.0
    meaning: Meaning | None = None

    @property
    def tile_parts(self) -> tuple[Part, ...]:
        """The parts as a tile holds them: what `store` makes."""
        return self.parts

    def store(self, coded: CodedMatrix) -> CodedMatrix:
        """Codes of `planes` and `tile_parts` from codes and parts."""
        return coded

    def restore(self, stored: CodedMatrix) -> CodedMatrix:
        """The inverse."""
        return stored

    @abc.abstractmethod
    def encode(self, matrix: Tensor) -> CodedMatrix:
        """Code float [.., rows, K] with blocks along K."""

    @abc.abstractmethod
    def decode(self, coded: CodedMatrix) -> Tensor:
        """float32 [.., rows, K], exactly what the format says."""

    def refuse(self, coded: CodedMatrix) -> None:
        """WeightsError if a part holds anything but finite numbers."""
        for part in self.parts:
            if part.dtype.is_floating_point and not _finite(coded[part.name]):
                raise not_finite(self.name, part.name)

    def tile_bytes(self, tile_width: int, hidden: int) -> int:
        return self.bytes_of(tile_width, hidden, MATRICES)

    def bytes_of(self, w: int, h: int, matrices: Sequence[str]) -> int:
        last = list(self.streams(w, h, matrices))[-1]
        return align_up(last.offset + last.num_bytes, _ALIGN)

    def streams(self, w: int, h: int, matrices: Sequence[str] = MATRICES) -> Iterator[Stream]:
        """The streams of a tile in order, of all its matrices or some."""
        if (w % self.block and DOWN in matrices) or h % self.columns_multiple:
            raise WeightsError(
                f"Experts of {h} x {w} columns can't be coded as {self.name}: it needs multiples of "
                f"{self.columns_multiple} and {self.block}.",
                code="invalid_expert_width",
                hint="Choose another weight format.",
            )
        at = 0
        for plane, bits in enumerate(self.planes):
            row = self._row_bytes(h, bits)
            for matrix in matrices:
                size = w * h * bits // 8 if matrix == DOWN else w * row
                yield Stream(matrix, None, at, size, w, h, plane)
                at += align_up(size, _ALIGN)
        for part in self.tile_parts:
            item = part.dtype.itemsize
            if not part.columns:
                yield Stream("", part, at, len(matrices) * item, len(matrices), 1)
                at += align_up(len(matrices) * item, _ALIGN)
                continue
            for matrix in matrices:
                tall, wide = (part.columns, part.rows) if matrix == DOWN else (part.rows, part.columns)
                height, width = ceil_div(w, tall), ceil_div(h, wide)
                yield Stream(matrix, part, at, height * width * item, height, width)
                at += align_up(height * width * item, _ALIGN)

    def device_code(self, tile_width: int, hidden: int) -> tuple[Matrix, ...]:
        return self.device_some(tile_width, hidden, MATRICES)

    def device_some(self, w: int, h: int, matrices: Sequence[str], start: int = 0) -> tuple[Matrix, ...]:
        """Of some matrices whose streams begin at byte `start` of a tile."""
        means = self.meaning
        if means is None:
            return ()
        streams = list(self.streams(w, h, matrices))
        found = []
        for order, name in enumerate(matrices):
            planes = tuple(
                (self.planes[s.plane], start + s.offset)
                for s in streams
                if s.part is None and s.matrix == name
            )
            lie = {s.part.name: s for s in streams if s.part is not None and s.matrix in ("", name)}
            step, least = (
                tuple(_scale(lie[part.partition(":")[0]], start, (name, order), part) for part in parts)
                for parts in (means.step, means.least)
            )
            found.append(
                Matrix(planes, means.level, step, least, means.sign, means.zero, self.words, name == DOWN)
            )
        return tuple(found)

    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        self.pack(self.encode(gate.float()), self.encode(up.float()), self.encode(down_t.t().float()), out)

    def pack_coded(
        self, matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix], tile_width: int, out: Tensor
    ) -> None:
        self.pack_some(dict(zip(MATRICES, matrices, strict=True)), tile_width, out)

    def pack_some(self, matrices: Mapping[str, CodedMatrix], w: int, tiles: Tensor) -> None:
        """Write all tiles of some of an expert's matrices, which come whole; `tiles` uint8 [T, bytes].

        Whoever read the codes has had them looked through (`refuse`).
        """
        if self._write_all(matrices, w, tiles):
            return
        axes = {GATE: -2, UP: -2, DOWN: -1}
        for tile, out in enumerate(tiles):
            a, b = tile * w, (tile + 1) * w
            self._write({name: self._cut(m, a, b, axes[name]) for name, m in matrices.items()}, out)

    def _write_all(self, matrices: Mapping[str, CodedMatrix], w: int, tiles: Tensor) -> bool:
        """The same bytes by the native library, all tiles of a stream at once; False if it can't."""
        if type(self).store is not CodedFormat.store:
            return False
        hidden = next(m["codes"].shape[-2 if name == DOWN else -1] for name, m in matrices.items())
        tiles.zero_()
        streams = list(self.streams(w, hidden, tuple(matrices)))
        if not all(self._cut_planes(n, m["codes"], (hidden, w), tiles, streams) for n, m in matrices.items()):
            return False
        for one in streams:
            if one.part is None:
                continue
            into = tiles[:, one.offset : one.offset + one.num_bytes]
            if not one.part.columns:
                single = torch.stack([m[one.part.name].reshape(()) for m in matrices.values()])
                into.copy_(single.view(torch.uint8))
                continue
            down = one.matrix == DOWN
            values = matrices[one.matrix][one.part.name]
            lines = _whole(values.t() if down else values).view(torch.uint8)
            span = one.part.columns if down else one.part.rows
            # Tiles that share a scale have a copy each.
            first = torch.arange(len(tiles)) * w // span
            rows = (first[:, None] + torch.arange(one.height)).flatten()
            into.copy_(lines[rows].view(len(tiles), -1))
        return True

    def pack(self, gate: CodedMatrix, up: CodedMatrix, down: CodedMatrix, out: Tensor) -> None:
        """Write one tile: gate, up [w, H] and down [H, w] in coded form; `out` uint8 [tile_bytes]."""
        matrices = {GATE: gate, UP: up, DOWN: down}
        for coded in matrices.values():
            self.refuse(coded)
        self.pack_some(matrices, gate["codes"].shape[0], out[None])

    def _write(self, matrices: Mapping[str, CodedMatrix], out: Tensor) -> None:
        name, first = next(iter(matrices.items()))
        w, h = first["codes"].mT.shape if name == DOWN else first["codes"].shape
        matrices = {name: self.store(coded) for name, coded in matrices.items()}
        out.zero_()
        streams = list(self.streams(w, h, tuple(matrices)))
        for one in streams:
            if one.part is None:
                body = self._pack_plane(one, matrices[one.matrix]["codes"])
            elif not one.part.columns:
                body = torch.stack([m[one.part.name].reshape(()) for m in matrices.values()])
            else:
                body = matrices[one.matrix][one.part.name]
                body = body.t() if one.matrix == DOWN else body
            raw = _whole(body).view(-1).view(torch.uint8)
            out[one.offset : one.offset + one.num_bytes] = raw

    def unpack(self, tiles: Tensor, w: int, h: int) -> tuple[CodedMatrix, CodedMatrix, CodedMatrix]:
        """uint8 [.., tile_bytes] back to gate, up [.., w, H] and down [.., H, w] in coded form."""
        found = self.unpack_some(tiles, w, h, MATRICES)
        return found[GATE], found[UP], found[DOWN]

    def unpack_some(
        self, tiles: Tensor, w: int, h: int, matrices: Sequence[str]
    ) -> Mapping[str, CodedMatrix]:
        """The inverse of `pack_some`: each matrix by its name."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in matrices}
        for one in self.streams(w, h, matrices):
            raw = tiles[..., one.offset : one.offset + one.num_bytes]
            if one.part is None:
                codes = self._unpack_plane(one, raw)
                found[one.matrix]["codes"] = found[one.matrix]["codes"] | codes if one.plane else codes
                continue
            values = _whole(raw).view(one.part.dtype).unflatten(-1, (one.height, one.width))
            if not one.part.columns:
                for i, matrix in enumerate(found):
                    found[matrix][one.part.name] = values[..., i : i + 1, :]
            else:
                found[one.matrix][one.part.name] = values.mT if one.matrix == DOWN else values
        return {name: self.restore(stored) for name, stored in found.items()}

    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (self.decode(m) for m in self.unpack(tiles, tile_width, hidden))
        return gate, up, down.mT

    def matrix_bytes(self, rows: int, columns: int) -> int:
        return self.bytes_of(rows, columns, (GATE,))

    def pack_matrix(self, coded: CodedMatrix, out: Tensor) -> None:
        self.pack_some({GATE: coded}, coded["codes"].shape[0], out[None])

    def unpack_matrix(self, packed: Tensor, shape: tuple[int, int]) -> CodedMatrix:
        return self.unpack_some(packed, *shape, (GATE,))[GATE]

    def below(self, packed: Sequence[Tensor], rows: Sequence[int], columns: int) -> Tensor:
        total = sum(rows)
        out = packed[0].new_zeros(self.matrix_bytes(total, columns))
        parts = [list(self.streams(count, columns, (GATE,))) for count in rows]
        for number, whole in enumerate(self.streams(total, columns, (GATE,))):
            own = [part[number] for part in parts]
            raw = [one[s.offset : s.offset + s.num_bytes] for one, s in zip(packed, own, strict=True)]
            torch.cat(raw, out=out[whole.offset : whole.offset + whole.num_bytes])
        return out

    def matrix_rows(self, packed: Tensor, shape: tuple[int, int], rows: Tensor) -> Tensor:
        one = packed.new_zeros(len(rows), self.matrix_bytes(1, shape[1]))
        streams = zip(self.streams(*shape, (GATE,)), self.streams(1, shape[1], (GATE,)), strict=True)
        for whole, own in streams:
            tall = 1 if whole.part is None else whole.part.rows
            lying = packed[whole.offset : whole.offset + whole.num_bytes].view(-1, own.num_bytes)
            of = torch.zeros_like(rows) if own.matrix != GATE else rows // tall
            one[:, own.offset : own.offset + own.num_bytes] = lying[of]
        return self.decode(self.unpack_some(one, 1, shape[1], (GATE,))[GATE]).squeeze(-2)

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

    def _row_bytes(self, h: int, bits: int) -> int:
        return ceil_div(h, 512 // bits) * 64 if self.words else h * bits // 8

    def _cut_planes(
        self, name: str, codes: Tensor, shape: tuple[int, int], tiles: Tensor, streams: Sequence[Stream]
    ) -> bool:
        """Write a matrix's planes into all tiles of [H, w] with the native library; False if it can't."""
        hidden, w = shape
        blocks = _byte_codes(w if name == DOWN else hidden, self.planes, self.words)
        if blocks is None or codes.dtype != torch.uint8 or codes.stride(-1) != 1:
            return False
        places = [tiles.data_ptr() + s.offset for s in streams if s.part is None and s.matrix == name]
        lying = unblock.Lying(codes.data_ptr(), codes.stride(0), hidden, w, len(tiles))
        return unblock.unblock(blocks, lying, places, tiles.stride(0), down=name == DOWN)

    def _pack_plane(self, one: Stream, codes: Tensor) -> Tensor:
        """Codes [rows, K] -> what the stream holds, of any dtype and shape."""
        bits, low = self.planes[one.plane], sum(self.planes[: one.plane])
        if len(self.planes) > 1:
            codes = codes >> low & (1 << bits) - 1
        codes = codes.t() if one.matrix == DOWN else codes
        if not self.words:
            return codes
        digits = 16 // bits
        if one.matrix != DOWN:
            rows = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % (32 * digits)))
            return _join(rows.unflatten(-1, (-1, digits, 32)).movedim(-2, 0), bits)
        if digits == 2:
            return _join(codes.unflatten(0, (-1, 2)).movedim(1, 0), 8)
        pairs = codes.unflatten(0, (-1, digits, 2))  # [w / (2 digits), digit, low or high word, H]
        return torch.stack([_join(pairs[:, :, half].movedim(1, 0), bits) for half in (0, 1)], -1)

    def _unpack_plane(self, one: Stream, raw: Tensor) -> Tensor:
        """The inverse: raw uint8 [.., bytes] -> [.., rows, K], in place within a code."""
        bits, low = self.planes[one.plane], sum(self.planes[: one.plane])
        lead, w, h = raw.shape[:-1], one.height, one.width
        if not self.words:
            codes = raw.reshape(*lead, w, h)
            return codes.mT if one.matrix == DOWN else codes
        digits = 16 // bits
        words = _whole(raw).view(torch.int16)
        if one.matrix != DOWN:
            codes = _split(words.reshape(*lead, w, -1, 1, 32), bits).reshape(*lead, w, -1)[..., :h]
        elif digits == 2:
            codes = _split(words.reshape(*lead, w // 2, 1, h), bits).reshape(*lead, w, h).mT
        else:
            halves = words.reshape(*lead, w // (2 * digits), 1, h, 2)
            codes = _split(halves, bits, -3).movedim(-1, -2).reshape(*lead, w, h).mT
        return codes << low


@functools.lru_cache
def _byte_codes(columns: int, planes: tuple[int, ...], words: bool) -> unblock.Blocks | None:
    """Rows of one code a byte, for the native library: a row is one block without parts."""
    if not unblock.available() or columns >= 1 << 16:
        return None
    field = unblock.Field(0, unblock.RAW, 8, 0, columns, 0)
    return unblock.blocks_of([field], planes, [], (columns, columns, int(words)))


def _finite(values: Tensor) -> bool:
    """True if all of a part's numbers are numbers; float8_e4m3fn knows one that isn't, with either sign."""
    if values.dtype == torch.float8_e4m3fn:
        return not values.numel() or int((values.view(torch.uint8) & 0x7F).amax()) < 0x7F
    return bool(torch.isfinite(values).all())


def _scale(lies: Stream, start: int, matrix: tuple[str, int], named: str) -> Scale:
    """The numbers of a stream in a tile whose streams begin at `start`, of matrix (name, order)."""
    part, offset = lies.part, start + lies.offset
    assert part is not None
    kind = named.partition(":")[2] or _KINDS[part.dtype]
    if not part.columns:
        return Scale(kind, offset + matrix[1] * part.dtype.itemsize)
    tall, wide = (part.columns, part.rows) if matrix[0] == DOWN else (part.rows, part.columns)
    return Scale(kind, offset, tall, wide)


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
