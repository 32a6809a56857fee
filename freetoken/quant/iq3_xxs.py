"""IQ3_XXS: points of a grid of 256 for four neighbours, a sign each; per 32 elements a four-bit scale, per
256 a float16 factor (GGUF).

weight = d * (sc + 1/2) / 2 * sign * magnitude. Eight signs have an even number of minuses, so GGUF stores
seven; in a tile there are all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._gguf import Raw
from freetoken.quant._iq3 import XXS_GAPS, Iq3


@dataclass(frozen=True)
class SevenSigns:
    """Words of 32 bits for 32 elements: four times seven signs, then the scale `sc`."""

    num_bytes: int = 32

    def read(self, raw: Tensor, out: dict[str, Tensor]) -> None:
        words = raw.contiguous().view(torch.int32)
        out["sc"] = (words >> 28 & 15).to(torch.uint8)
        sevens = words[..., None] >> torch.tensor([0, 7, 14, 21], dtype=torch.int32)
        signs = (sevens[..., None] >> torch.arange(7, dtype=torch.int32) & 1).to(torch.uint8)
        last = signs.sum(-1, keepdim=True).to(torch.uint8) & 1
        out["sign"] = torch.cat([signs, last], -1).flatten(-3)

    def write(self, arrays: CodedMatrix) -> Tensor:
        signs = arrays["sign"].unflatten(-1, (-1, 4, 8))[..., :7].long()
        sevens = (signs << torch.arange(7)).sum(-1)
        words = (sevens << torch.tensor([0, 7, 14, 21])).sum(-1) | arrays["sc"].long() << 28
        return words.to(torch.int32).view(torch.uint8)


class Iq3Xxs(Iq3):
    name = "iq3_xxs"
    gaps, magnitudes = XXS_GAPS, (4, 12, 20, 28, 36, 44, 52, 62)
    even_signs = True
    error = 0.6
    gguf_type = 18
    fields = (Raw("d", 2, torch.float16), Raw("index", 64, torch.uint8), SevenSigns())

    def factor(self, sc: Tensor) -> Tensor:
        return (0.5 + sc) * 0.5

    def nearest_scale(self, factor: Tensor) -> Tensor:
        return 2 * factor - 0.5


FORMAT = Iq3Xxs()
