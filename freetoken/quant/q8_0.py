"""Q8_0: signed bytes, one float16 scale for every 32 elements along the summed dimension (GGUF)."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import CodedMatrix
from freetoken.quant._coded import CodedFormat, Part, blocks_of, spread


class Q8_0(CodedFormat):
    name = "q8_0"
    block = 32
    code_bits = 8
    words = False
    parts = (Part("scales", torch.float16, 32),)
    error = 0.006

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 32)
        scales = (blocks.abs().amax(-1) / 127.0).to(torch.float16)
        step = scales.float()
        codes = (blocks / torch.where(step > 0, step, 1.0)[..., None]).round().clamp(-127, 127)
        return {"codes": codes.flatten(-2).to(torch.int8).view(torch.uint8), "scales": scales}

    def decode(self, coded: CodedMatrix) -> Tensor:
        codes = coded["codes"].contiguous().view(torch.int8).float()
        return codes * spread(coded["scales"].float(), codes, 32)

    @staticmethod
    def from_gguf(raw: Tensor) -> CodedMatrix:
        """uint8 [rows, K / 32 * 34]: blocks of a scale and 32 bytes."""
        blocks = blocks_of(raw, 34)
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        return {"codes": blocks[..., 2:].flatten(-2), "scales": scales}

    @staticmethod
    def to_gguf(coded: CodedMatrix) -> Tensor:
        """The inverse of `from_gguf`."""
        scales = coded["scales"].contiguous().unsqueeze(-1).view(torch.uint8)
        return torch.cat([scales, blocks_of(coded["codes"], 32)], -1).flatten(-2)


FORMAT = Q8_0()
