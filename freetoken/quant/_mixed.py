"""Experts whose matrices are coded in different ways, as quantisers leave them: Q4_K with down in Q6_K.

A tile is the tile of the first format with only its matrices, then that of the next. Knows how to split
and join; what codes mean is each format's own. Invariant: packing is lossless, as in every format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freetoken.core.codes import Matrix
from freetoken.core.weights import CodedMatrix, Lay, Stored, WeightFormat
from freetoken.quant._coded import DOWN, MATRICES, CodedFormat
from freetoken.quant._laying import laying

JOIN = "+"


class MixedFormat(WeightFormat):
    """gate, up and down in one format each; neighbours of the same format share a part of the tile.

    name   the parts' names, joined by plus
    """

    def __init__(self, formats: Sequence[CodedFormat]) -> None:
        self.parts: list[tuple[CodedFormat, tuple[str, ...]]] = []
        for matrix, fmt in zip(MATRICES, formats, strict=True):
            if self.parts and self.parts[-1][0].name == fmt.name:
                self.parts[-1] = (fmt, (*self.parts[-1][1], matrix))
            else:
                self.parts.append((fmt, (matrix,)))
        self.name = joined_name([fmt.name for fmt in formats])
        self.block = math.lcm(*(fmt.block for fmt in formats))

    def tile_bytes(self, tile_width: int, hidden: int) -> int:
        return sum(fmt.bytes_of(tile_width, hidden, names) for fmt, names in self.parts)

    def pack_tile(self, gate: Tensor, up: Tensor, down_t: Tensor, out: Tensor) -> None:
        whole = dict(zip(MATRICES, (gate, up, down_t.t()), strict=True))
        coded = {name: fmt.encode(whole[name].float()) for fmt, names in self.parts for name in names}
        self._pack(coded, len(gate), out[None])

    def pack_coded(
        self, matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix], tile_width: int, out: Tensor
    ) -> None:
        self._pack(dict(zip(MATRICES, matrices, strict=True)), tile_width, out)

    def laying(
        self,
        shape: tuple[int, int],
        tile_width: int,
        stored: Sequence[Sequence[Stored]],
        *,
        alternating: bool = False,
    ) -> Lay | None:
        return laying(self.parts, shape, tile_width, stored, alternating)

    def _pack(self, matrices: Mapping[str, CodedMatrix], w: int, out: Tensor) -> None:
        hidden = matrices[DOWN]["codes"].shape[-2]
        for (fmt, names), raw in zip(self.parts, self._split(out, w, hidden), strict=True):
            fmt.pack_some({name: matrices[name] for name in names}, w, raw)

    def tile_weights(self, tiles: Tensor, tile_width: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
        found: dict[str, Tensor] = {}
        for (fmt, names), raw in zip(self.parts, self._split(tiles, tile_width, hidden), strict=True):
            some = fmt.unpack_some(raw, tile_width, hidden, names)
            found |= {name: fmt.decode(coded) for name, coded in some.items()}
        gate, up, down = (found[name] for name in MATRICES)
        return gate, up, down.mT

    def device_code(self, tile_width: int, hidden: int) -> tuple[Matrix, ...]:
        found: list[Matrix] = []
        start = 0
        for fmt, names in self.parts:
            some = fmt.device_some(tile_width, hidden, names, start)
            if not some:
                return ()
            found += some
            start += fmt.bytes_of(tile_width, hidden, names)
        return tuple(found)

    def _split(self, tiles: Tensor, w: int, h: int) -> tuple[Tensor, ...]:
        sizes = [fmt.bytes_of(w, h, names) for fmt, names in self.parts]
        return tuple(torch.split(tiles[..., : sum(sizes)], sizes, -1))


def joined_name(names: Sequence[str]) -> str:
    """Of gate, up and down: `q4_k` if they agree, `q4_k+q6_k` if only down differs, else all three."""
    gate, up, down = names
    if gate == up == down:
        return gate
    return JOIN.join((gate, down) if gate == up else names)


def split_name(name: str) -> list[str]:
    """The inverse: gate's, up's and down's format."""
    parts = name.split(JOIN)
    return [parts[0], *parts] if len(parts) == 2 else parts * 3 if len(parts) == 1 else parts
