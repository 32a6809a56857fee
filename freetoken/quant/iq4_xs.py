"""IQ4_XS: four-bit codes of uneven levels; per 32 elements a six-bit scale, per 256 a float16 factor (GGUF).

weight = d * (sc - 32) * level[code]. In a tile the six-bit numbers lie in bytes of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.codes import IQ4
from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._gguf import Digits, GgufFormat, Raw
from freetoken.quant._levels import LevelFormat, factors, product


class Iq4Xs(LevelFormat, GgufFormat):
    name = "iq4_xs"
    block = columns_multiple = 256
    levels = IQ4
    parts = (Part("sc", torch.uint8, 32), Part("d", torch.float16, 256))
    error = 0.14
    meaning = Meaning("iq4", ("d", "sc:u6"))
    gguf_type, gguf_columns = 23, 256
    fields = (
        Raw("d", 2, torch.float16),
        Digits("sc", 2, bits=2, at=4),
        Digits("sc", 4, bits=4),
        Digits("codes", 128, bits=4, run=16),
    )

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, None]:
        return product(coded["d"], coded["sc"].float() - 32, 8), None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        d, sc = factors(step, 8, 31)
        return {"sc": (sc + 32).to(torch.uint8), "d": d}


FORMAT = Iq4Xs()
