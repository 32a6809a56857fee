"""IQ3_XXS and IQ3_S: four neighbours of a row are one point of a grid of 256 or 512, with a sign each.

The points are digits 0-7, which stand for eight magnitudes; as base-8 numbers, first neighbour lowest, they
ascend, so a grid is its gaps. A code is a magnitude's digit and a sign on top. In a tile the points' numbers
and signs lie as a block has them (`tile_parts`): codes are what they stand for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Part, blocks_of, spread
from freetoken.quant._gguf import GgufFormat

# The gap before each point, in digits of base 85.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
XXS_GAPS = (
    "0225241279P2425274327BC822572724A6E4612BZJK5BC246JGpNK42LEG25272522B1O2772l25277Y62E9DGB4Ze4IJC@"
    "EW27252439V223277R41827612D1DK74i4XEOKAR*2BNS7272LD562E9B2R25DLGFIzFJ66CRVILeLKBE2C4@KF1G6HUVbBX"
    "EL@32EoNN86GNVEW8fTB4Z8N_iEoG2ETWUba6+XbneEo221IGiAgR5MDELXGV2I)"
)
S_GAPS = (
    "01132111222146523222527331112414334247D456142133343463222D386432723642D243B4236636FA2C245642F5B3"
    "2EHF722C245D4K1124122212732E239612324573672E62A3214663A3A7331366145H6B252D27424L73672Fd43D2R2527"
    "C4H68122212223241272232D13232634334367O33A2572A4A34234925276EB693734P3759D1BD825AS4K4D2B5Q722237"
    "225232A6822752DGA42A6A2CP7452419246E86547H64D72B5AADJJW2D2BZ46643377GA522765664K2554A5F36C525274"
    "Z2IB1PC2AXPHKO5BB6P646E433C6522579W69A56DN51FD5C663CACaCJ2tW2Et22C2LGG7TMI6B568C5FrEFE3PKLRf2r43"
    "92C2C6G7BF2S34637HPO3EM465OgGWNd"
)


@functools.cache
def grid_of(gaps: str) -> Tensor:
    """uint8 [points, 4]: digits of the four neighbours."""
    numbers = torch.tensor([_DIGITS.index(gap) for gap in gaps]).cumsum(0)
    return (numbers[:, None] >> torch.tensor([0, 3, 6, 9]) & 7).to(torch.uint8)


@functools.cache
def _points(gaps: str) -> Tensor:
    """int32 [4096]: the point of a number of four digits, 0 where there is none."""
    grid = grid_of(gaps).long()
    points = torch.zeros(4096, dtype=torch.int32)
    points[(grid << torch.tensor([0, 3, 6, 9])).sum(-1)] = torch.arange(len(grid), dtype=torch.int32)
    return points


@functools.cache
def _nearest_points(gaps: str, levels: tuple[int, ...]) -> Tensor:
    """int64 [4096]: the point nearest to each number of four digits."""
    grid, magnitudes = grid_of(gaps), torch.tensor(levels, dtype=torch.float32)
    every = torch.arange(4096)[:, None] >> torch.tensor([0, 3, 6, 9]) & 7
    return torch.cdist(magnitudes[every], magnitudes[grid.int()]).argmin(-1)


class Iq3(GgufFormat):
    """Subclasses give `gaps`, `magnitudes`, what a scale of four bits means, and how a tile has it all.

    What lies in a tile are a block's fields as they are, so `fields` fill `tile_parts`, not codes.
    """

    gaps: str
    magnitudes: tuple[int, ...]
    even_signs = False
    block = columns_multiple = 256
    planes = ()
    parts = (Part("sc", torch.uint8, 32), Part("d", torch.float16, 256))
    gguf_columns = 256

    def factor(self, sc: Tensor) -> Tensor:
        """What d is multiplied by, float32."""
        raise NotImplementedError

    def nearest_scale(self, factor: Tensor) -> Tensor:
        """The inverse, not yet rounded."""
        raise NotImplementedError

    def decode(self, coded: CodedMatrix) -> Tensor:
        both = torch.tensor([*self.magnitudes, *(-m for m in self.magnitudes)], dtype=torch.float32)
        step = spread(coded["d"].float(), coded["sc"], 8) * self.factor(coded["sc"].float())
        return spread(step, coded["codes"], 32) * both[coded["codes"].int()]

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 32)
        wanted = blocks.abs().amax(-1) / self.magnitudes[-1]
        most = float(self.factor(torch.tensor(15.0)))
        d = (blocks_of(wanted, 8).amax(-1) / most).half()
        whole = spread(d.float(), wanted, 8)
        whole = torch.where(whole > 0, whole, 1.0)
        sc = self.nearest_scale(wanted / whole).round().clamp(0, 15)
        ratio = blocks / (whole * self.factor(sc))[..., None]
        magnitudes = torch.tensor(self.magnitudes, dtype=torch.float32)
        sizes = ratio.abs().contiguous()
        digits = torch.bucketize(sizes, (magnitudes[1:] + magnitudes[:-1]) / 2).flatten(-2)
        numbers = (blocks_of(digits, 4) << torch.tensor([0, 3, 6, 9])).sum(-1)
        digits = grid_of(self.gaps)[_nearest_points(self.gaps, self.magnitudes)[numbers]].flatten(-2)
        signs = (ratio < 0).to(torch.uint8).flatten(-2)
        if self.even_signs:
            signs = _evened(signs, matrix)
        return {"codes": digits | signs << 3, "sc": sc.to(torch.uint8), "d": d}

    def points(self, coded: CodedMatrix) -> Tensor:
        """int32 [.., K / 4]: numbers of the grid's points."""
        digits = blocks_of(coded["codes"] & 7, 4).int()
        return _points(self.gaps)[(digits << torch.tensor([0, 3, 6, 9], dtype=torch.int32)).sum(-1)]

    def codes(self, points: Tensor, signs: Tensor) -> Tensor:
        """The inverse, with a sign for each."""
        return grid_of(self.gaps)[points.int()].flatten(-2) | signs << 3

    def from_gguf(self, raw: Tensor) -> CodedMatrix:
        return self.restore(super().from_gguf(raw))

    def to_gguf(self, coded: CodedMatrix) -> Tensor:
        return super().to_gguf({"codes": coded["codes"], **self.store(coded)})


def _evened(signs: Tensor, matrix: Tensor) -> Tensor:
    """Flip the sign of the smallest of each eight with an odd number of minus signs."""
    eights = blocks_of(signs, 8)
    smallest = blocks_of(matrix.abs(), 8).argmin(-1, keepdim=True)
    odd = eights.sum(-1, keepdim=True) & 1
    return eights.scatter(-1, smallest, eights.gather(-1, smallest) ^ odd.to(torch.uint8)).flatten(-2)
