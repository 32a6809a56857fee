"""A GGUF model's tensors under canonical names: plain ones as numbers, coded ones as the file's blocks.

Rows are gathered whole, so blocks stay blocks; what a block means is its weight format's to say.
Invariant: every tensor of the model is of a type that something here reads, or opening refuses it by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError, nearest
from freetoken.core.weights import BLOCKS, CodedMatrix, WeightSource
from freetoken.weights.gguf_names import Piece, pieces
from freetoken.weights.gguf_split import GgufModel


class GgufSource(WeightSource):
    """`model`'s tensors for a family whose config.json is `config`."""

    def __init__(self, model: GgufModel, config: Mapping[str, Any]) -> None:
        self._model = model
        self._pieces = pieces(model.tensors, model.metadata["general.architecture"], config)
        unread = {p.tensor.name: p.tensor.type.name for p in self._pieces.values() if not _read(p)}
        if unread:
            shown = ", ".join(f"{name} ({kind})" for name, kind in list(unread.items())[:8])
            raise WeightsError(
                f"{model.path.name} has {len(unread)} tensors of types that nothing here reads: {shown}.",
                code="unknown_weight_format",
                hint="Fetch the model in another quantisation, for example Q4_K_M or Q8_0.",
            )

    def names(self) -> Iterable[str]:
        return self._pieces.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the numbers; what is coded decodes to float32."""
        return self._find(name).tensor.type.dtype or torch.float32

    def coding(self, name: str) -> str:
        return self._find(name).tensor.type.format

    def columns(self, name: str) -> Tensor | None:
        return self._find(name).columns

    def stored_bytes(self, name: str) -> int:
        piece = self._find(name)
        return piece.tensor.row_bytes * _num_rows(piece)

    def read(self, name: str) -> Tensor:
        return self._numbers(name, 0, _num_rows(self._find(name)))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        piece = self._find(name)
        if len(piece.shape) != 2 or not 0 <= start <= stop <= piece.shape[0]:
            raise IndexError(f"rows {start}..{stop} of {name} {list(piece.shape)}")
        return self._numbers(name, start, stop)

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        """The matrix as blocks, a view where rows lie in order; each expert has a name, so no `index`."""
        piece = self._find(name)
        shape = torch.empty(piece.shape, dtype=torch.uint8, device="meta")
        return {BLOCKS: self._raw(piece, 0, _num_rows(piece)), "codes": shape}

    def close(self) -> None:
        self._model.files.close()

    def _find(self, name: str) -> Piece:
        if name not in self._pieces:
            raise WeightsError(
                f"{self._model.path.name} has no tensor {name}.",
                code="missing_tensor",
                hint=nearest(name, self._pieces),
            )
        return self._pieces[name]

    def _raw(self, piece: Piece, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, row bytes], rows in the piece's order."""
        if piece.order is None:
            return self._model.rows(piece.tensor, piece.start + start, piece.start + stop)
        whole = self._model.rows(piece.tensor, piece.start, piece.start + len(piece.order))
        return whole[piece.order[start:stop]]

    def _numbers(self, name: str, start: int, stop: int) -> Tensor:
        piece = self._find(name)
        dtype = piece.tensor.type.dtype
        if dtype is None:
            raise TypeError(f"{name} is coded")
        if len(piece.tensor.shape) == 1:
            numbers = self._line(piece, dtype)
        else:
            numbers = self._raw(piece, start, stop).clone().view(dtype)
        numbers = numbers if piece.fix is None else piece.fix(numbers.float())
        if piece.columns is not None:
            numbers = numbers[:, piece.columns.argsort()]
        return numbers.reshape(stop - start if len(piece.shape) > 1 else -1, *piece.shape[1:])

    def _line(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """A vector is one row of the file: it is ordered by element."""
        line = self._model.rows(piece.tensor, 0, 1).clone().view(dtype)[0]
        return line if piece.order is None else line[piece.order]


def _num_rows(piece: Piece) -> int:
    return piece.shape[0] if len(piece.shape) > 1 else 1


def _read(piece: Piece) -> bool:
    return piece.tensor.type.dtype is not None or bool(piece.tensor.type.format)
