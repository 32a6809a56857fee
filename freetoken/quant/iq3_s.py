"""IQ3_S: points of a grid of 512 for four neighbours, a sign each; per 32 elements a four-bit scale, per 256
a float16 factor (GGUF).

weight = d * (1 + 2 sc) * sign * magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Part
from freetoken.quant._gguf import Digits, Raw
from freetoken.quant._iq3 import S_GAPS, Iq3

_BITS, _NIBBLES = Digits("all", 1, bits=1), Digits("all", 1, bits=4)


def _apart(digits: Digits, raw: Tensor) -> Tensor:
    out: dict[str, Tensor] = {}
    digits.read(raw.contiguous().view(torch.uint8), out)
    return out["all"]


def _together(digits: Digits, numbers: Tensor) -> Tensor:
    return digits.write({"all": numbers.to(torch.uint8)}).contiguous()


class Iq3S(Iq3):
    name = "iq3_s"
    gaps, magnitudes = S_GAPS, tuple(range(1, 16, 2))
    tile_parts = (
        Part("index", torch.uint8, 4),
        Part("high", torch.uint8, 32),
        Part("signs", torch.int32, 32),
        Part("scales", torch.uint8, 64),
        Part("d", torch.float16, 256),
    )
    error = 0.3
    gguf_type = 21
    fields = (
        Raw("d", 2, torch.float16),
        Raw("index", 64, torch.uint8),
        Raw("high", 8, torch.uint8),
        Raw("signs", 32, torch.int32),
        Raw("scales", 4, torch.uint8),
    )

    def factor(self, sc: Tensor) -> Tensor:
        return 1 + 2 * sc

    def nearest_scale(self, factor: Tensor) -> Tensor:
        return (factor - 1) / 2

    def store(self, coded: CodedMatrix) -> CodedMatrix:
        points = self.points(coded)
        return {
            "index": (points & 255).to(torch.uint8),
            "high": _together(_BITS, points >> 8),
            "signs": _together(_BITS, coded["codes"] >> 3).view(torch.int32),
            "scales": _together(_NIBBLES, coded["sc"]),
            "d": coded["d"],
        }

    def restore(self, stored: CodedMatrix) -> CodedMatrix:
        points = stored["index"].int() | _apart(_BITS, stored["high"]).int() << 8
        codes = self.codes(points, _apart(_BITS, stored["signs"]))
        return {"codes": codes, "sc": _apart(_NIBBLES, stored["scales"]), "d": stored["d"]}


FORMAT = Iq3S()
