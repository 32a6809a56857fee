"""Q6_K: six-bit codes; per 16 elements a signed byte as scale, per 256 a float16 factor (GGUF).

weight = d * sc * (code - 32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat, factors, product


class Q6K(LevelFormat, GgufFormat):
    name = "q6_k"
    block = columns_multiple = 256
    planes = (4, 2)
    group = 16
    levels = tuple(range(-32, 32))
    parts = (Part("sc", torch.int8, 16), Part("d", torch.float16, 256))
    error = 0.06
    meaning = Meaning("uint", ("sc", "d"), zero=32)
    gguf_type, gguf_columns = 14, 256
    fields = (
        Digits("codes", 128, bits=4, run=64),
        Digits("codes", 64, bits=2, run=32, at=4),
        Raw("sc", 16, torch.int8),
        Raw("d", 2, torch.float16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return product(coded["d"], coded["sc"], 16), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        d, sc = factors(step, 16, 127)
        return {"sc": sc.to(torch.int8), "d": d}


FORMAT = Q6K()
