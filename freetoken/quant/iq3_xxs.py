"""IQ3_XXS: points of a grid of 256 for four neighbours, a sign each; per 32 elements a four-bit scale, per
256 a float16 factor (GGUF).

weight = d * (sc + 1/2) / 2 * sign * magnitude. Eight signs have an even number of minuses, so seven are
stored: a word of 32 bits is four times seven signs, then the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Part
from freetoken.quant._gguf import Raw
from freetoken.quant._iq3 import XXS_GAPS, Iq3

_SEVENS = torch.tensor([0, 7, 14, 21], dtype=torch.int32)


class Iq3Xxs(Iq3):
    name = "iq3_xxs"
    gaps, magnitudes = XXS_GAPS, (4, 12, 20, 28, 36, 44, 52, 62)
    even_signs = True
    tile_parts = (
        Part("index", torch.uint8, 4),
        Part("words", torch.int32, 32),
        Part("d", torch.float16, 256),
    )
    error = 0.6
    gguf_type = 18
    fields = (Raw("d", 2, torch.float16), Raw("index", 64, torch.uint8), Raw("words", 32, torch.int32))

    def factor(self, sc: Tensor) -> Tensor:
        return (0.5 + sc) * 0.5

    def nearest_scale(self, factor: Tensor) -> Tensor:
        return 2 * factor - 0.5

    def store(self, coded: CodedMatrix) -> CodedMatrix:
        signs = (coded["codes"] >> 3).unflatten(-1, (-1, 4, 8))[..., :7].int()
        sevens = (signs << torch.arange(7, dtype=torch.int32)).sum(-1, dtype=torch.int32)
        words = (sevens << _SEVENS).sum(-1, dtype=torch.int32) | coded["sc"].int() << 28
        return {"index": self.points(coded).to(torch.uint8), "words": words, "d": coded["d"]}

    def restore(self, stored: CodedMatrix) -> CodedMatrix:
        words = stored["words"]
        sevens = words[..., None] >> _SEVENS
        signs = (sevens[..., None] >> torch.arange(7, dtype=torch.int32) & 1).to(torch.uint8)
        last = signs.sum(-1, keepdim=True, dtype=torch.uint8) & 1
        codes = self.codes(stored["index"], torch.cat([signs, last], -1).flatten(-3))
        return {"codes": codes, "sc": (words >> 28 & 15).to(torch.uint8), "d": stored["d"]}


FORMAT = Iq3Xxs()
