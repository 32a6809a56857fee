"""FP8 e4m3 matrices, whatever their scales cover: codes as published, weight = code * scale."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import CodedFormat, Meaning, not_finite

MOST = 448.0


class Fp8(CodedFormat):
    """One part, `scales`; subclasses say what one covers."""

    block = 8
    planes = (8,)
    never = {"codes": "e4m3"}
    error = 0.04
    meaning = Meaning("e4m3", ("scales",))

    @abc.abstractmethod
    def largest(self, matrix: Tensor) -> Tensor:
        """Largest magnitudes of what each scale covers, shaped as the scales."""

    @abc.abstractmethod
    def spread(self, scales: Tensor, like: Tensor) -> Tensor:
        """The scales in a shape that multiplies [.., rows, K]."""

    def encode(self, matrix: Tensor) -> CodedMatrix:
        largest = self.largest(matrix)
        scales = torch.where(largest > 0, largest / MOST, 1.0)
        codes = (matrix / self.spread(scales, matrix)).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8), "scales": scales}

    def decode(self, coded: CodedMatrix) -> Tensor:
        codes = coded["codes"].contiguous().view(torch.float8_e4m3fn).float()
        return codes * self.spread(coded["scales"], codes)

    def refuse(self, coded: CodedMatrix) -> None:
        super().refuse(coded)
        codes = coded["codes"]
        if codes.numel() and int((codes & 0x7F).amax()) == 0x7F:
            raise not_finite(self.name, "code")

    def from_tensors(self, weight: Tensor, scales: Tensor) -> CodedMatrix:
        """e4m3 [rows, K] and its scales, of the shape that checkpoints give them."""
        part = self.parts[0]
        shape = (-1, -(-weight.shape[-1] // part.columns)) if part.columns else (1, 1)
        return {"codes": weight.view(torch.uint8), "scales": scales.float().reshape(shape)}

    def to_tensors(self, coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        """The inverse."""
        return coded["codes"].contiguous().view(torch.float8_e4m3fn), coded["scales"]
