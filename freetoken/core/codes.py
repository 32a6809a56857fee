"""How coded matrices lie in a tile and what their codes mean, as plain data that devices can read.

A weight format makes it (`WeightFormat.device_code`), kernels follow it; neither knows the other.
weight = level(code) * step - least. step and least are products of numbers that each cover a rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("uint", "int8", "e2m1", "e4m3")
NUMBERS = ("f16", "f32", "u8", "i8", "e4m3", "e8m0")


@dataclass(frozen=True)
class Scale:
    """Numbers of a kind of NUMBERS from byte `offset` of a tile on, [ceil(w / tall), ceil(H / wide)].

    One number covers `tall` of the tile's w columns of I and `wide` of H; tall 0: one for all of it.
    """

    kind: str
    offset: int
    tall: int = 0
    wide: int = 0


@dataclass(frozen=True)
class Matrix:
    """One matrix of a tile, w x H as the tile holds it (down transposed).

    planes   (bits, offset) each, lowest bits first; digits of 16-bit words unless `words` is False
    level    what a code is: an integer minus `zero`, a signed byte, a four-bit or an eight-bit float
    step     whose product scales the level
    least    whose product, times `sign`, is subtracted
    down     words run along w, else along H (native/coded.h draws both)
    """

    planes: tuple[tuple[int, int], ...]
    level: str
    step: tuple[Scale, ...]
    least: tuple[Scale, ...] = ()
    sign: int = 1
    zero: int = 0
    words: bool = True
    down: bool = False


@dataclass(frozen=True)
class Coded:
    """A record of coded tiles; sizes in bytes. bias_offset 0: no biases (as in grouped_mlp.Form)."""

    hidden: int
    tile_width: int
    num_tiles: int
    tile_bytes: int
    tiles_offset: int
    matrices: tuple[Matrix, Matrix, Matrix]
    bias_offset: int = 0

    def plain_bytes(self) -> tuple[int, int, int, int]:
        """(record, tile, tiles_offset, bias_offset) of the uncoded record, two bytes a weight."""
        code = 6 * self.tile_width * self.hidden
        bias = -(-code // 64) * 64 if self.bias_offset else 0
        tile = -(-(bias + 8 * self.tile_width if bias else code) // 128) * 128
        return self.tiles_offset + self.num_tiles * tile, tile, self.tiles_offset, bias
