"""IQ4_NL: four-bit codes of uneven levels, one float16 step for every 32 elements (GGUF).

weight = d * level[code].
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.codes import IQ4
from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat


class Iq4Nl(LevelFormat, GgufFormat):
    name = "iq4_nl"
    block = 32
    levels = IQ4
    parts = (Part("d", torch.float16, 32),)
    error = 0.12
    meaning = Meaning("iq4", ("d",))
    gguf_type, gguf_columns = 20, 32
    fields = (Raw("d", 2, torch.float16), Digits("codes", 16, bits=4, run=16))

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return coded["d"].float(), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        return {"d": step.half()}


FORMAT = Iq4Nl()
