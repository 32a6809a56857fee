"""Q4_1: four-bit codes, a float16 step and offset for every 32 elements along the summed dimension (GGUF).

weight = d * code + m.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat


class Q4_1(LevelFormat, GgufFormat):
    name = "q4_1"
    block = 32
    affine = True
    levels = tuple(range(16))
    parts = (Part("d", torch.float16, 32), Part("m", torch.float16, 32))
    error = 0.07
    meaning = Meaning("uint", ("d",), ("m",), sign=-1)
    gguf_type, gguf_columns = 3, 32
    fields = (
        Raw("d", 2, torch.float16),
        Raw("m", 2, torch.float16),
        Digits("codes", 16, bits=4, run=16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        return coded["d"].float(), -coded["m"].float()

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        return {"d": step.half(), "m": -least.half()}


FORMAT = Q4_1()
