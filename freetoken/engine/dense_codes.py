"""Dense tensors on their way into FTW: what each is written as, and what coding it anew costs.

Codes stay codes, laid out as the engine multiplies them; what is asked to be coded anew goes through numbers,
some rows at a time. Embeddings, norms, routers and whatever else is no product keep their numbers. Knows no
file. Invariant: the pieces of a matrix share what its format has one of.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.model_config import ModelConfig
from freetoken.core.weights import CodedMatrix, WeightFormat, WeightSource
from freetoken.quant import _reading as reading
from freetoken.quant._coded import CodedFormat
from freetoken.quant._plain import PlainFormat
from freetoken.weights.files import Arena
from freetoken.weights.ftw import dtype_name
from freetoken.weights.ftw_index import CODES

CHUNK_BYTES = 64 << 20
WHOLE_BLOCKS = 256
"""Rows of a piece are a multiple of this: no format has a scale for more."""
CLASSES = (
    ("attention", re.compile(r"\.self_attn\.[qkvo]_proj\.weight$")),
    ("DeltaNet", re.compile(r"\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$")),
    ("dense MLP", re.compile(r"\.mlp\.(shared_expert\.)?(gate|up|down)_proj\.weight$")),
    ("head", re.compile(r"^lm_head\.weight$")),
)
"""Matrices that are multiplied with every token, by what an error is reported for."""
TIED = "model.embed_tokens.weight"


@dataclass
class Errors:
    """What coding anew cost, by class of matrix: relative RMS error of all of them, and of the worst."""

    squares: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, name: str, square: float, difference: float) -> None:
        """One matrix: the sum of its squares, and that of its differences."""
        with self._lock:
            self.squares[name] = self.squares.get(name, 0.0) + square
            self.differences[name] = self.differences.get(name, 0.0) + difference
            relative = (difference / square) ** 0.5 if square else 0.0
            self.worst[name] = max(self.worst.get(name, 0.0), relative)

    def rows(self) -> list[tuple[str, float, float]]:
        """(class, relative RMS error, the worst matrix's)."""
        return [
            (name, (self.differences[name] / square) ** 0.5 if square else 0.0, self.worst[name])
            for name, square in sorted(self.squares.items())
        ]


def squares(wanted: Tensor, got: Tensor) -> tuple[float, float]:
    """Sums of squares: of what was wanted, and of what differs."""
    wanted = wanted.float()
    return float(wanted.square().sum()), float((wanted - got.float()).square().sum())


@dataclass(frozen=True)
class Form:
    """What a tensor is written as.

    dtype   as the index names it
    fmt     of a coded one
    group   the class whose error is noted; empty: as it is
    """

    dtype: str
    num_bytes: int
    fmt: WeightFormat | None = None
    group: str = ""


class DenseCodes:
    """wish: the format for CLASSES, None: as they are."""

    def __init__(self, source: WeightSource, config: ModelConfig, wish: WeightFormat | None) -> None:
        self._source, self._wish = source, wish
        self._compute: torch.dtype = getattr(torch, config.dtype)
        self._tied = config.tie_embeddings
        self.errors = Errors()

    def form(self, name: str) -> Form:
        source, shape = self._source, self._source.shape(name)
        coding, group = source.coding(name), self._group(name)
        if self._wish is not None and group:
            if isinstance(self._wish, PlainFormat):
                return self._numbers(shape, self._wish.dtype, group)
            if size := packed_bytes(self._wish, shape):
                return Form(CODES + self._wish.name, size, self._wish, group)
        if coding and source.columns(name) is None and (size := packed_bytes(reading.find(coding), shape)):
            return Form(CODES + coding, size, reading.find(coding))
        return self._numbers(shape, self._compute if coding else source.dtype(name), "")

    def left_out(self, names: Iterable[str]) -> list[str]:
        """Matrices that were to be coded and whose shape the format can't have."""
        return [n for n in names if self._wish is not None and self._group(n) and not self.form(n).group]

    def parts(self, name: str, arena: Arena) -> Iterator[Tensor]:
        """The tensor as `form` says, in pieces along its first axis; what is coded as bytes, whole.

        arena   what this thread reads into: a piece is valid until the next one
        """
        form = self.form(name)
        if form.fmt is None:
            for piece in self._pieces(name, arena):
                made = piece.to(getattr(torch, form.dtype))
                if form.group:
                    self.errors.note(form.group, *squares(piece, made))
                yield made
        elif form.group:
            yield self._coded_anew(name, form, arena)
        else:
            yield reading.weight(self._source, [name]).packed

    def _group(self, name: str) -> str:
        if name == TIED and self._tied:
            return "head"
        return next((group for group, pattern in CLASSES if pattern.search(name)), "")

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype, group: str) -> Form:
        return Form(dtype_name(dtype), torch.Size(shape).numel() * dtype.itemsize, None, group)

    def _pieces(self, name: str, arena: Arena) -> Iterator[Tensor]:
        """Numbers, of what is large some rows at a time."""
        source, shape = self._source, self._source.shape(name)
        size = source.stored_bytes(name)
        if source.coding(name) or len(shape) < 2 or size <= CHUNK_BYTES:
            whole = reading.numbers(source, name)
            yield from whole.split(_rows(shape, 4 * whole.numel())) if len(shape) == 2 else (whole,)
            return
        step = _rows(shape, size)
        for start in range(0, shape[0], step):
            yield source.read_rows(name, start, min(shape[0], start + step))
            arena.reset()

    def _coded_anew(self, name: str, form: Form, arena: Arena) -> Tensor:
        fmt = form.fmt
        assert isinstance(fmt, CodedFormat)
        largest = None
        if any(not part.columns for part in fmt.parts):
            largest = max((piece.float().abs().amax() for piece in self._pieces(name, arena)), key=float)
        square = difference = 0.0
        found: list[CodedMatrix] = []
        for piece in self._pieces(name, arena):
            made = encode_piece(fmt, piece.float(), largest)
            more = squares(piece, fmt.decode(made))
            square, difference = square + more[0], difference + more[1]
            found.append(made)
        self.errors.note(form.group, square, difference)
        rows, columns = self._source.shape(name)
        packed = torch.empty(fmt.matrix_bytes(rows, columns), dtype=torch.uint8)
        fmt.pack_matrix(joined(fmt, found), packed)
        return packed


def packed_bytes(fmt: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix of that shape packed alone; 0 if the format can't hold one."""
    if len(shape) != 2:
        return 0
    try:
        return fmt.matrix_bytes(shape[0], shape[1])
    except WeightsError:  # its columns are no multiple of the format's block
        return 0


def encode_piece(fmt: CodedFormat, piece: Tensor, largest: Tensor | None) -> CodedMatrix:
    """Some rows of a matrix, float32 [n, K], coded as within the whole.

    largest   the matrix's largest magnitude, where the format scales all of it by one number: rows that hold
              it are coded along and dropped, so that every piece finds the same one
    """
    if largest is None:
        return fmt.encode(piece)
    more = torch.zeros(WHOLE_BLOCKS, piece.shape[1])
    more[-1, 0] = largest
    rows, coded = len(piece), fmt.encode(torch.cat([piece, more]))
    kept = {"codes": coded["codes"][:rows]}
    for part in fmt.parts:
        value = coded[part.name]
        kept[part.name] = value[: -(-rows // part.rows)] if part.columns else value
    return kept


def joined(fmt: CodedFormat, pieces: list[CodedMatrix]) -> CodedMatrix:
    single = {part.name for part in fmt.parts if not part.columns}
    return {
        name: first if name in single else torch.cat([piece[name] for piece in pieces])
        for name, first in pieces[0].items()
    }


def _rows(shape: tuple[int, ...], num_bytes: int) -> int:
    """Rows of about CHUNK_BYTES, whole blocks of them."""
    each = max(1, CHUNK_BYTES * shape[0] // max(num_bytes, 1))
    return max(WHOLE_BLOCKS, each // WHOLE_BLOCKS * WHOLE_BLOCKS)
