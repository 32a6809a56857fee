"""FP8 e4m3 with one float32 scale for every 128 x 128 block of a matrix, as DeepSeek and Qwen publish it.

weight = code * scale (`weight_scale_inv`). Encoding a part of a matrix scales that part's blocks alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.quant._coded import Part, spread
from freetoken.quant._fp8 import Fp8

SIDE = 128


class Fp8Block(Fp8):
    name = "fp8_block"
    parts = (Part("scales", torch.float32, SIDE, SIDE),)

    def largest(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape[-2:]
        padded = torch.nn.functional.pad(matrix, (0, -columns % SIDE, 0, -rows % SIDE))
        return padded.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE)).abs().amax((-1, -3))

    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        return spread(scales, like, SIDE, SIDE)


FORMAT = Fp8Block()
