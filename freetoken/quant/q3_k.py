"""Q3_K: three-bit codes; per 16 elements a six-bit scale, per 256 a float16 factor (GGUF).

weight = d * (sc - 32) * (code - 4). In a tile the six-bit numbers lie in bytes of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat, factors, product


class Q3K(LevelFormat, GgufFormat):
    name = "q3_k"
    block = columns_multiple = 256
    planes = (2, 1)
    group = 16
    levels = tuple(range(-4, 4))
    parts = (Part("sc", torch.uint8, 16), Part("d", torch.float16, 256))
    error = 0.25
    meaning = Meaning("uint", ("d", "sc:u6"), zero=4)
    gguf_type, gguf_columns = 11, 256
    fields = (
        Digits("codes", 32, bits=1, run=32, at=2),
        Digits("codes", 64, bits=2, run=32),
        Digits("sc", 8, bits=4, run=8),
        Digits("sc", 4, bits=2, run=4, at=4),
        Raw("d", 2, torch.float16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return product(coded["d"], coded["sc"].float() - 32, 16), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        d, sc = factors(step, 16, 31)
        return {"sc": (sc + 32).to(torch.uint8), "d": d}


FORMAT = Q3K()
