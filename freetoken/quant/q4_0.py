"""Q4_0: four-bit codes, one float16 step for every 32 elements along the summed dimension (GGUF).

weight = d * (code - 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat


class Q4_0(LevelFormat, GgufFormat):
    name = "q4_0"
    block = 32
    levels = tuple(range(-8, 8))
    parts = (Part("d", torch.float16, 32),)
    error = 0.13
    meaning = Meaning("uint", ("d",), zero=8)
    gguf_type, gguf_columns = 2, 32
    fields = (Raw("d", 2, torch.float16), Digits("codes", 16, bits=4, run=16))

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return coded["d"].float(), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        return {"d": step.half()}


FORMAT = Q4_0()
