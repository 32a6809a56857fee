"""FP8 e4m3 with one float32 scale for every row (output channel) of a matrix. weight = code * scale."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.quant._coded import ALL, Part
from freetoken.quant._fp8 import Fp8


class Fp8Channel(Fp8):
    name = "fp8_channel"
    parts = (Part("scales", torch.float32, ALL),)

    def largest(self, matrix: Tensor) -> Tensor:
        return matrix.abs().amax(-1, keepdim=True)

    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        return scales


FORMAT = Fp8Channel()
