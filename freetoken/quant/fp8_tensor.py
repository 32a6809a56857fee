"""FP8 e4m3 with one float32 scale for a whole matrix. weight = code * scale."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.quant._coded import Part
from freetoken.quant._fp8 import Fp8


class Fp8Tensor(Fp8):
    name = "fp8_tensor"
    parts = (Part("scales", torch.float32, 0),)

    def largest(self, matrix: Tensor) -> Tensor:
        return matrix.abs().amax((-1, -2), keepdim=True)

    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        return scales


FORMAT = Fp8Tensor()
