"""What a coded tile consists of, and how tensors as a checkpoint has them get there by one native call.

Owns parts and streams, and the steps by which stored codes and scales of gate, up and down become streams.
Steps are made once for all experts that are stored alike. Invariant: what is laid is what `pack_coded` writes
from the same tensors, and whatever has no step here, or is no number, is left to it.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from freetoken.core import weights
from freetoken.core.errors import WeightsError
from freetoken.core.units import ceil_div
from freetoken.core.weights import Lay, Stored, WeightFormat
from freetoken.native import stored as native
from freetoken.native.library import library

GATE, UP, DOWN = MATRICES = ("gate", "up", "down")
_FINITE = {
    torch.float8_e4m3fn: native.E4M3,
    torch.float16: native.F16,
    torch.float32: native.F32,
    "e4m3": native.E4M3,
    "e8m0": native.E8M0,
}
_WIDENED = {
    torch.bfloat16: native.FROM_BF16,
    torch.float16: native.FROM_F16,
    torch.float32: native.FROM_F32,
}
_ORDERS = {weights.FIELDS: 0x76543210, weights.SHUFFLED: 0x73625140}
"""The field of each of eight rows, that of the first in the lowest four bits."""
_BYTES = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Part:
    """What scales codes: one value for rows x columns of a matrix; columns 0 = one for all of it."""

    name: str
    dtype: torch.dtype
    columns: int
    rows: int = 1

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many there are, for a matrix of that shape."""
        return (ceil_div(rows, self.rows), ceil_div(columns, self.columns)) if self.columns else (1, 1)


@dataclass(frozen=True)
class Stream:
    """A run of bytes in a tile: a plane of `matrix`'s codes (part None) or a part of it, [height, width]."""

    matrix: str
    part: Part | None
    offset: int
    num_bytes: int
    height: int
    width: int
    plane: int = 0


class LaidFormat(WeightFormat):
    """A format whose tiles are streams.

    planes  bits of a code that each plane holds, lowest first
    words   rows hold codes as 16-bit words of which one digit spans 32 elements; False: bytes as they come
    never   kinds of parts, or of codes, of which a value is no number though their type is an integer's
    adopts  parts that a checkpoint's tensors have by another name, and that name
    halves  a float16 part, and the part that is a power of two for all of it: `adopt` makes both of one
    """

    planes: tuple[int, ...] = (4,)
    words = True
    parts: tuple[Part, ...] = ()
    never: Mapping[str, str] = {}
    adopts: Mapping[str, str] = {}
    halves: tuple[str, str] = ("", "")

    @abc.abstractmethod
    def streams(self, w: int, h: int, matrices: Sequence[str] = MATRICES) -> Iterator[Stream]:
        """The streams of a tile in order, of all its matrices or some."""

    def laying(
        self,
        shape: tuple[int, int],
        tile_width: int,
        stored: Sequence[Sequence[Stored]],
        *,
        alternating: bool = False,
    ) -> Lay | None:
        return laying([(self, MATRICES)], shape, tile_width, stored, alternating)

    @abc.abstractmethod
    def bytes_of(self, w: int, h: int, matrices: Sequence[str]) -> int:
        """Bytes of a tile that holds these matrices."""


class _Unknown(Exception):
    """There is no step for that."""


def laying(
    parts: Sequence[tuple[LaidFormat, Sequence[str]]],
    shape: tuple[int, int],
    tile_width: int,
    stored: Sequence[Sequence[Stored]],
    alternating: bool,
) -> Lay | None:
    """`WeightFormat.laying` for a tile of several formats, one after the other, each with some matrices."""
    if library() is None:
        return None
    (hidden, size), w, used = shape, tile_width, 0
    whole = {GATE: (size, hidden), UP: (size, hidden), DOWN: (hidden, size)}
    number = itertools.count()
    found = [{one.lies.part: (next(number), one) for one in some} for some in stored]
    fused = len(found) == 2
    mine = dict(zip(whole, (found[0], *found) if fused else found, strict=True))
    # The first of a matrix's rows among those that are stored, and the step to the next.
    rows = {GATE: (0, 2), UP: (1, 2)} if alternating else {GATE: (0, 1), UP: (size, 1)}
    steps: list[native.Step] = []
    try:
        for fmt, names in parts:
            streams = [replace(s, offset=used + s.offset) for s in fmt.streams(w, hidden, names)]
            for order, name in enumerate(names):
                own = [s for s in streams if s.matrix in ("", name)]
                one = _Matrix(fmt, whole[name], w, own, order, name == DOWN, 1 + (fused and name != DOWN))
                made = one.steps(mine[name])
                steps += [_some_rows(s, *rows[name]) for s in made] if fused and not one.down else made
            used += fmt.bytes_of(w, hidden, names)
    except (_Unknown, WeightsError):
        return None
    return native.Laying(steps, (hidden, w, size // w), used)


@dataclass(frozen=True)
class _Matrix:
    """One matrix [rows, columns] on its way.

    width    columns of I in a tile
    streams  its own, and those that it shares
    order    its place among those that share one
    of       how many matrices its stored rows are of
    """

    fmt: LaidFormat
    shape: tuple[int, int]
    width: int
    streams: Sequence[Stream]
    order: int
    down: bool
    of: int = 1

    def steps(self, stored: Mapping[str, tuple[int, Stored]]) -> list[native.Step]:
        """A step for each stored tensor; _Unknown if one has none, or lacks."""
        names = {part: self.fmt.adopts.get(part.name, part.name) for part in self.fmt.parts}
        names = {part: name for part, name in names.items() if part.name != self.fmt.halves[1]}
        promised = stored.keys() & {weights.EIGHTS, weights.SORTED}
        if stored.keys() - promised != {"codes", *names.values()}:
            raise _Unknown
        found = [self._codes(*stored["codes"])]
        found += [self._part(part, *stored[name]) for part, name in names.items()]
        return found + [self._promise(*stored[name]) for name in sorted(promised)]

    def _codes(self, tensor: int, one: Stored) -> native.Step:
        """Codes of eight bits or four, in words of two or four digits."""
        rows, columns = self.shape
        step = native.Step(tensor=tensor, item=1, down=self.down, rows=rows)
        bits = 4 if one.lies.packing else 8
        if self.fmt.planes != (bits,) or not self.fmt.words or columns % 32 or self.width % 8:
            raise _Unknown
        step.kind, step.columns = native.CODES if bits == 8 else native.NIBBLES, columns * bits // 8
        step.offsets[0] = next(s.offset for s in self.streams if s.part is None)
        if bits == 8:
            if one.lies != weights.Lies("codes") or one.dtype not in _BYTES:
                raise _Unknown
            step.finite = _FINITE.get(self.fmt.never.get("codes"), native.ANY)
        return self._lying(step, one, columns)

    def _part(self, part: Part, tensor: int, one: Stored) -> native.Step:
        """Numbers as they lie, or made float32, or float16 and a power of two."""
        rows, columns = part.grid(*self.shape)
        lying = self._stream(part.name)
        step = native.Step(
            tensor=tensor, item=part.dtype.itemsize, down=self.down, rows=rows, columns=columns
        )
        step.finite = _FINITE.get(self.fmt.never.get(part.name, part.dtype), native.ANY)
        step.offsets[0] = lying.offset
        if not part.columns:
            step.kind, step.offsets[0] = native.SINGLE, lying.offset + self.order * step.item
        elif part.name == self.fmt.halves[0]:
            power = self._stream(self.fmt.halves[1])
            step.kind, step.offsets[1] = native.HALVES, power.offset + self.order * 4
        else:
            step.kind = native.PART
        step.span, step.lines = (part.columns if self.down else part.rows), lying.height
        if not one.lies.packing:
            step.numbers = _numbers(part, step.kind, one)
        elif part.dtype != torch.uint8:
            raise _Unknown
        return self._lying(step, one, columns)

    def _promise(self, tensor: int, one: Stored) -> native.Step:
        """What nothing is laid of."""
        rows, columns = self.shape
        step = native.Step(kind=native.SORTED, tensor=tensor, item=4, rows=1, columns=columns)
        if one.lies.part == weights.EIGHTS:
            # Each group of each row has one; how many groups there are, the part that is scaled says.
            groups = next(p for p in self.fmt.parts if p.columns).grid(rows, columns)[1]
            step.kind, step.item, step.rows, step.columns = native.EIGHTS, 1, rows, groups
            if one.lies.packing not in _ORDERS:
                raise _Unknown
        elif one.lies.packing or one.dtype != torch.int32:
            raise _Unknown
        return self._lying(step, one, step.columns)

    def _lying(self, step: native.Step, one: Stored, columns: int) -> native.Step:
        """The step with the places of `columns` numbers a row, if the tensor is just as large as that."""
        packing, rows = one.lies.packing, step.rows
        if packing == weights.NIBBLES:
            size, step.row, step.column = rows * columns // 2, columns // 2, 1
            if one.lies.turned:
                step.numbers, step.row = native.TURNED, 4 * rows
        elif packing:
            if one.dtype != torch.int32 or rows % 8:
                raise _Unknown
            size, step.numbers, step.more = rows * columns // 2, native.FIELDS, one.lies.less
            step.order = _ORDERS[packing]
            step.row, step.column = (4, rows // 2) if one.lies.turned else (4 * columns, 4)
        else:
            item = one.dtype.itemsize
            size = rows * columns * item
            step.row, step.column = (item, rows * item) if one.lies.turned else (columns * item, item)
        if self.of > 1 and step.kind != native.SINGLE:
            # Rows of two matrices: a scale of several rows could span both, and one of all rows does.
            mixed = step.kind == native.HALVES or rows != self.shape[0]
            if mixed or one.lies.turned or packing in _ORDERS:
                raise _Unknown
            size *= self.of
        if one.num_bytes != size:
            raise _Unknown
        return step

    def _stream(self, name: str) -> Stream:
        return next(s for s in self.streams if s.part is not None and s.part.name == name)


def _numbers(part: Part, kind: int, one: Stored) -> int:
    """How plain numbers are turned into the part's."""
    if one.lies.less or one.lies.turned and kind != native.HALVES:
        raise _Unknown
    if one.lies.inverse:
        if (one.dtype, part.dtype) == (torch.float32, torch.float32):
            return native.RECIPROCAL
    elif kind == native.HALVES and one.dtype in _WIDENED:
        return _WIDENED[one.dtype]
    elif one.dtype == part.dtype or {one.dtype, part.dtype} == {torch.uint8, torch.float8_e8m0fnu}:
        return native.AS_THEY_LIE
    elif part.dtype == torch.float32 and one.dtype in _WIDENED:
        return _WIDENED[one.dtype]
    raise _Unknown


def _some_rows(step: native.Step, first: int, every: int) -> native.Step:
    """The step for a part of the rows that it was made for."""
    if step.kind != native.SINGLE:
        step.start, step.row = first * step.row, every * step.row
    return step
