"""Q5_0: five-bit codes, one float16 step for every 32 elements along the summed dimension (GGUF).

weight = d * (code - 16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat


class Q5_0(LevelFormat, GgufFormat):
    name = "q5_0"
    block = 32
    planes = (4, 1)
    levels = tuple(range(-16, 16))
    parts = (Part("d", torch.float16, 32),)
    error = 0.07
    meaning = Meaning("uint", ("d",), zero=16)
    gguf_type, gguf_columns = 6, 32
    fields = (
        Raw("d", 2, torch.float16),
        Digits("codes", 4, bits=1, at=4),
        Digits("codes", 16, bits=4, run=16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return coded["d"].float(), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        return {"d": step.half()}


FORMAT = Q5_0()
