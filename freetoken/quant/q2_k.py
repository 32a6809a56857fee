"""Q2_K: two-bit codes; per 16 elements a four-bit scale and minimum, per 256 two float16 factors (GGUF).

weight = d * low nibble * code - dmin * high nibble; a byte holds the nibbles of 16 elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat, factors, product


class Q2K(LevelFormat, GgufFormat):
    name = "q2_k"
    block = columns_multiple = 256
    planes = (2,)
    group = 16
    affine = True
    levels = tuple(range(4))
    parts = (
        Part("scales", torch.uint8, 16),
        Part("d", torch.float16, 256),
        Part("dmin", torch.float16, 256),
    )
    error = 0.35
    meaning = Meaning("uint", ("d", "scales:low4"), ("dmin", "scales:high4"))
    gguf_type, gguf_columns = 10, 256
    fields = (
        Raw("scales", 16, torch.uint8),
        Digits("codes", 64, bits=2, run=32),
        Raw("d", 2, torch.float16),
        Raw("dmin", 2, torch.float16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        both = coded["scales"]
        return product(coded["d"], both & 15, 16), product(coded["dmin"], both >> 4, 16)

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        d, sc = factors(step, 16, 15)
        dmin, mn = factors(least.clamp(min=0), 16, 15)
        return {"scales": (sc + 16 * mn).to(torch.uint8), "d": d, "dmin": dmin}


FORMAT = Q2K()
