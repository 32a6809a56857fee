"""IQ3_S: points of a grid of 512 for four neighbours, a sign each; per 32 elements a four-bit scale, per 256
a float16 factor (GGUF).

weight = d * (1 + 2 sc) * sign * magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.quant._coded import Part
from freetoken.quant._gguf import Digits, Raw
from freetoken.quant._iq3 import S_GAPS, Iq3


class Iq3S(Iq3):
    name = "iq3_s"
    gaps, magnitudes = S_GAPS, tuple(range(1, 16, 2))
    tile_parts = (*Iq3.tile_parts, Part("high", torch.uint8, 32))
    error = 0.3
    gguf_type = 21
    fields = (
        Raw("d", 2, torch.float16),
        Raw("index", 64, torch.uint8),
        Digits("high", 8, bits=1),
        Digits("sign", 32, bits=1),
        Digits("sc", 4, bits=4),
    )

    def factor(self, sc: Tensor) -> Tensor:
        return 1 + 2 * sc

    def nearest_scale(self, factor: Tensor) -> Tensor:
        return (factor - 1) / 2


FORMAT = Iq3S()
