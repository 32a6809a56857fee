"""The record: one expert's bytes, the unit on disk, in host memory and in a slot. Pure arithmetic.

    0                 header      float32 [H] bias of down, 256-byte aligned; empty without biases
    header_bytes      tile 0      gate rows, up rows, down part for `tile_width` of the I columns, then
                                  float32 [2, tile_width] biases of gate and up if there are any
    + tile_bytes      tile 1 ...  each 128-byte aligned; T tiles; the record is 4096-byte aligned

Knows no weights. Invariant: tiles cover I exactly once, in order, so a prefix of tiles is a prefix of
bytes and any run of tiles is one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import WeightFormat
from freetoken.core.units import align_up

RECORD_ALIGN, TILE_ALIGN, HEADER_ALIGN, BIAS_ALIGN = 4096, 128, 256, 64
_WIDTHS = (256, 128, 64, 32, 16, 8)


@dataclass(frozen=True)
class RecordLayout:
    """Geometry of one layer's records. Sizes in bytes.

    hidden, expert_size   H and I
    tile_width            columns of I in a tile
    code_bytes            bytes of a tile that the format fills; `tile_bytes` is that and biases, aligned
    header_bytes          bytes before the tiles; with them the tiles have biases too
    """

    hidden: int
    expert_size: int
    tile_width: int
    code_bytes: int
    header_bytes: int = 0

    @property
    def num_tiles(self) -> int:
        return self.expert_size // self.tile_width

    @property
    def biased(self) -> bool:
        return self.header_bytes > 0

    @property
    def bias_offset(self) -> int:
        """Where in a tile the biases of gate and up lie."""
        return align_up(self.code_bytes, BIAS_ALIGN)

    @property
    def tile_bytes(self) -> int:
        used = self.bias_offset + 8 * self.tile_width if self.biased else self.code_bytes
        return align_up(used, TILE_ALIGN)

    @property
    def tiles_offset(self) -> int:
        return align_up(self.header_bytes, HEADER_ALIGN)

    @property
    def used_bytes(self) -> int:
        """Bytes up to the end of the last tile: what a fill moves."""
        return self.tiles_offset + self.num_tiles * self.tile_bytes

    @property
    def record_bytes(self) -> int:
        return align_up(self.used_bytes, RECORD_ALIGN)

    def tiles(self, record: Tensor) -> Tensor:
        """uint8 [T, tile_bytes], a view of a record."""
        return record[self.tiles_offset : self.used_bytes].view(self.num_tiles, self.tile_bytes)

    def tile_range(self, first: int, last: int) -> tuple[int, int]:
        """Byte range of tiles [first, last); the header travels with tile 0."""
        start = 0 if first == 0 else self.tiles_offset + first * self.tile_bytes
        return start, self.tiles_offset + last * self.tile_bytes


def tile_width(expert_size: int, block: int) -> int:
    """Choose the columns of a tile: the widest of at least 32 that leaves 16 tiles (a fine split, small
    work items), else any that leaves four, two, one. Tiny geometries go down to 8.
    """
    fitting = [w for w in _WIDTHS if w % block == 0 and expert_size % w == 0]
    for least, narrowest in ((16, 32), (4, 8), (2, 8), (1, 8)):
        for width in fitting:
            if width >= narrowest and expert_size // width >= least:
                return width
    if expert_size % block == 0:
        return block if expert_size // block <= 64 else expert_size
    raise WeightsError(
        f"Experts of width {expert_size} can't be cut into code blocks of {block}.",
        code="invalid_expert_width",
        hint="Choose a weight format with a smaller block.",
    )


def layout(
    hidden: int, expert_size: int, fmt: WeightFormat, width: int = 0, *, biased: bool = False
) -> RecordLayout:
    """Lay one expert of H x I out in `fmt`; `width` overrides the tile width."""
    width = width or tile_width(expert_size, fmt.block)
    header = 4 * hidden if biased else 0
    return RecordLayout(hidden, expert_size, width, fmt.tile_bytes(width, hidden), header)
