"""How coded matrices lie in a tile and what their codes mean, as plain data that devices can read.

A weight format makes it (`WeightFormat.device_code`), kernels follow it; neither knows the other.
weight = level(code) * step - least. step and least are products of numbers that each cover a rectangle.
Plain numbers are codes too: of 16 or 32 bits, whose level is the number.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("uint", "int8", "e2m1", "e4m3", "iq4", "bf16", "f16", "f32")
NUMBERS = ("f16", "f32", "u8", "i8", "e4m3", "e8m0", "low4", "high4", "u6")
"""low4, high4: half of a byte; u6: a byte minus 32."""
PLAIN = ("bf16", "f16", "f32")
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The uneven levels of four-bit codes in IQ4_NL and IQ4_XS."""


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

    planes   (bits, offset) each, lowest bits first; digits of 16-bit words unless `words` is False: then
             one plane of codes of whole bytes, [w, H]
    level    what a code is: an integer minus `zero`, a signed byte, a four-bit or an eight-bit float, an
             entry of a table, or a number as it is
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

    @property
    def plain(self) -> str:
        """The type whose numbers the record holds as they are, one of PLAIN; empty if there is none."""
        levels = {one.level for one in self.matrices}
        return levels.pop() if len(levels) == 1 and levels <= set(PLAIN) else ""

    def plain_bytes(self) -> tuple[int, int, int, int]:
        """(record, tile, tiles_offset, bias_offset) of the uncoded record, two bytes a weight."""
        code = 6 * self.tile_width * self.hidden
        bias = -(-code // 64) * 64 if self.bias_offset else 0
        tile = -(-(bias + 8 * self.tile_width if bias else code) // 128) * 128
        return self.tiles_offset + self.num_tiles * tile, tile, self.tiles_offset, bias
