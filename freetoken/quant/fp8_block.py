"""FP8 e4m3 with one float32 scale for every 128 x 128 block of a matrix, as DeepSeek and Qwen publish it.

weight = code * scale (`weight_scale_inv`). Encoding a part of a matrix scales that part's blocks alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import CodedMatrix
from freetoken.quant._coded import CodedFormat, Meaning, Part, not_finite, spread

SIDE = 128


class Fp8Block(CodedFormat):
    name = "fp8_block"
    block = 8
    planes = (8,)
    parts = (Part("scales", torch.float32, SIDE, SIDE),)
    error = 0.04
    meaning = Meaning("e4m3", ("scales",))

    def encode(self, matrix: Tensor) -> CodedMatrix:
        rows, columns = matrix.shape[-2:]
        padded = torch.nn.functional.pad(matrix, (0, -columns % SIDE, 0, -rows % SIDE))
        largest = padded.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE)).abs().amax((-1, -3))
        scales = torch.where(largest > 0, largest / 448.0, 1.0)
        codes = (matrix / spread(scales, matrix, SIDE, SIDE)).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8), "scales": scales}

    def decode(self, coded: CodedMatrix) -> Tensor:
        codes = coded["codes"].contiguous().view(torch.float8_e4m3fn).float()
        return codes * spread(coded["scales"], codes, SIDE, SIDE)

    def refuse(self, coded: CodedMatrix) -> None:
        super().refuse(coded)
        if bool((coded["codes"] & 0x7F == 0x7F).any()):
            raise not_finite(self.name, "code")

    @staticmethod
    def from_tensors(weight: Tensor, scale_inv: Tensor) -> CodedMatrix:
        """e4m3 [rows, K] and float32 [rows / 128, K / 128], both rounded up, as in a checkpoint."""
        return {"codes": weight.view(torch.uint8), "scales": scale_inv.float()}

    @staticmethod
    def to_tensors(coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        """The inverse of `from_tensors`."""
        return coded["codes"].contiguous().view(torch.float8_e4m3fn), coded["scales"]


FORMAT = Fp8Block()
