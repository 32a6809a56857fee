"""Q4_K: four-bit codes; per 32 elements a six-bit scale and minimum, per 256 two float16 factors (GGUF).

weight = d * sc * code - dmin * mn. In a tile the six-bit numbers lie in bytes of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import CodedMatrix
from freetoken.quant._coded import CodedFormat, Part, blocks_of, spread


class Q4K(CodedFormat):
    name = "q4_k"
    block = 256
    columns_multiple = 256
    parts = (
        Part("sc", torch.uint8, 32),
        Part("mn", torch.uint8, 32),
        Part("d", torch.float16, 256),
        Part("dmin", torch.float16, 256),
    )
    error = 0.2

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 32)
        least = (-blocks.amin(-1)).clamp(min=0)
        scale = (blocks.amax(-1) + least).clamp(min=0) / 15.0
        d, sc = _six_bits(scale)
        dmin, mn = _six_bits(least)
        step, low = _whole(d, sc), _whole(dmin, mn)
        codes = (blocks + low[..., None]) / torch.where(step > 0, step, 1.0)[..., None]
        codes = codes.round().clamp(0, 15).to(torch.uint8).flatten(-2)
        return {"codes": codes, "sc": sc, "mn": mn, "d": d, "dmin": dmin}

    def decode(self, coded: CodedMatrix) -> Tensor:
        codes = coded["codes"].float()
        step, low = _whole(coded["d"], coded["sc"]), _whole(coded["dmin"], coded["mn"])
        return codes * spread(step, codes, 32) - spread(low, codes, 32)

    @staticmethod
    def from_gguf(raw: Tensor) -> CodedMatrix:
        """uint8 [rows, K / 256 * 144]: d, dmin, twelve bytes of six-bit numbers, 128 bytes of nibbles."""
        blocks = blocks_of(raw, 144)
        factors = blocks[..., :4].contiguous().view(torch.float16)
        six = blocks[..., 4:16].int()
        a, b, c = six[..., :4], six[..., 4:8], six[..., 8:]
        sc = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], -1)
        mn = torch.cat([b & 63, c >> 4 | (b >> 6) << 4], -1)
        nibbles = blocks[..., 16:].unflatten(-1, (4, 32))
        codes = torch.stack([nibbles & 15, nibbles >> 4], -2)
        return {
            "codes": codes.flatten(-4),
            "sc": sc.to(torch.uint8).flatten(-2),
            "mn": mn.to(torch.uint8).flatten(-2),
            "d": factors[..., 0],
            "dmin": factors[..., 1],
        }

    @staticmethod
    def to_gguf(coded: CodedMatrix) -> Tensor:
        """The inverse of `from_gguf`."""
        sc, mn = (blocks_of(coded[name], 8).int() for name in ("sc", "mn"))
        a = (sc[..., :4] & 63) | (sc[..., 4:] >> 4) << 6
        b = (mn[..., :4] & 63) | (mn[..., 4:] >> 4) << 6
        c = (sc[..., 4:] & 15) | (mn[..., 4:] & 15) << 4
        factors = torch.stack([coded["d"], coded["dmin"]], -1).view(torch.uint8)
        nibbles = coded["codes"].unflatten(-1, (-1, 4, 2, 32))
        packed = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).flatten(-2)
        return torch.cat([factors, *(v.to(torch.uint8) for v in (a, b, c)), packed], -1).flatten(-2)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split [.., n] numbers >= 0 into float16 [.., n / 8] and six-bit factors [.., n]."""
    d = (blocks_of(values, 8).amax(-1) / 63.0).to(torch.float16)
    step = spread(d.float(), values, 8)
    return d, (values / torch.where(step > 0, step, 1.0)).round().clamp(0, 63).to(torch.uint8)


def _whole(d: Tensor, six: Tensor) -> Tensor:
    return spread(d.float(), six, 8) * six.float()


FORMAT = Q4K()
