"""Tiles of uncoded weights: gate [w, H], up [w, H], down transposed [w, H], one after the other.

Lossless for sources of the same type; decoding is a view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.codes import Matrix
from freetoken.core.weights import WeightFormat
from freetoken.native.library import library


class PlainFormat(WeightFormat):
    """A format whose code is the number itself, of one torch dtype."""

    block = 1
    error_bound = 0.0
    dtype: torch.dtype

    @property
    def gguf_bytes(self) -> int:
        size: int = self.dtype.itemsize
        return size

    def dequantise(self, raw: Tensor) -> Tensor:
        return raw.contiguous().view(self.dtype).float()

    def detects(self, dtype: torch.dtype) -> bool:
        return bool(dtype == self.dtype)

    def tile_bytes(self, tile_width: int, hidden: int) -> int:
        return int(3 * tile_width * hidden * self.dtype.itemsize)

    def device_code(self, tile_width: int, hidden: int) -> tuple[Matrix, ...]:
        bits, size = 8 * self.dtype.itemsize, tile_width * hidden * self.dtype.itemsize
        planes = [((bits, size * order),) for order in range(3)]
        return tuple(Matrix(p, self.name, (), words=False, down=order == 2) for order, p in enumerate(planes))

    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        parts = out.view(self.dtype).view(3, *gate.shape)
        for part, matrix in zip(parts, (gate, up, down_t), strict=True):
            part.copy_(matrix)

    def pack_tiles(self, gate: Tensor, up: Tensor, down_t: Tensor, tile_width: int, out: Tensor) -> None:
        lib, matrices = library(), (gate, up, down_t.t())
        size, hidden = gate.shape
        if lib is not None and all(m.dtype == self.dtype and m.is_contiguous() for m in matrices):
            shape = (hidden, size, tile_width, out.stride(0))
            places = tuple(m.data_ptr() for m in matrices)
            lib.pack_plain(self.dtype.itemsize, places, out.data_ptr(), shape)
            return
        each = out[:, : self.tile_bytes(tile_width, hidden)].view(self.dtype)
        parts = each.unflatten(1, (3, tile_width, hidden))
        for at, matrix in enumerate((gate, up, down_t)):
            parts[:, at].copy_(matrix.unflatten(0, (-1, tile_width)))

    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        used = tiles[..., : self.tile_bytes(tile_width, hidden)]
        gate, up, down_t = used.view(self.dtype).unflatten(-1, (3, tile_width, hidden)).unbind(-3)
        return gate, up, down_t
