"""Q4_K: four-bit codes; per 32 elements a six-bit scale and minimum, per 256 two float16 factors (GGUF).

weight = d * sc * code - dmin * mn. In a tile the six-bit numbers lie in bytes of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw, SixBits
from freetoken.quant._levels import LevelFormat, factors, product


class Q4K(LevelFormat, GgufFormat):
    name = "q4_k"
    block = columns_multiple = 256
    affine = True
    levels = tuple(range(16))
    parts = (
        Part("sc", torch.uint8, 32),
        Part("mn", torch.uint8, 32),
        Part("d", torch.float16, 256),
        Part("dmin", torch.float16, 256),
    )
    error = 0.07
    meaning = Meaning("uint", ("sc", "d"), ("mn", "dmin"))
    gguf_type, gguf_columns = 12, 256
    fields = (
        Raw("d", 2, torch.float16),
        Raw("dmin", 2, torch.float16),
        SixBits(),
        Digits("codes", 128, bits=4, run=32),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        return product(coded["d"], coded["sc"], 8), product(coded["dmin"], coded["mn"], 8)

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        d, sc = factors(step, 8, 63)
        dmin, mn = factors(least.clamp(min=0), 8, 63)
        return {"sc": sc.to(torch.uint8), "mn": mn.to(torch.uint8), "d": d, "dmin": dmin}


FORMAT = Q4K()
