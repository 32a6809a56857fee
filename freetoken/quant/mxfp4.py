"""MXFP4: e2m1 codes, a power of two (e8m0) for every 32 elements along the summed dimension.

weight = code * 2^(scale - 127). Stored as gpt-oss does, `blocks` with the low nibble first and `scales`; or
as GGUF does, the low nibbles being a block's first half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import CodedMatrix
from freetoken.quant import _e2m1
from freetoken.quant._coded import Meaning, Part, blocks_of, not_finite, spread
from freetoken.quant._gguf import Digits, GgufFormat, Raw


class Mxfp4(GgufFormat):
    name = "mxfp4"
    block = 32
    parts = (Part("scales", torch.uint8, 32),)
    error = 0.26
    never = {"scales": "e8m0"}
    meaning = Meaning("e2m1", ("scales:e8m0",))
    gguf_type, gguf_columns = 39, 32
    exponents = "scales"
    fields = (Raw("scales", 1, torch.uint8), Digits("codes", 16, bits=4, run=16))

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 32)
        largest = blocks.abs().amax(-1)
        exponent = torch.frexp(largest).exponent - 1 - 2
        scales = torch.where(largest > 0, exponent + 127, 127).clamp(0, 254)
        codes = _e2m1.nearest(torch.ldexp(blocks, (127 - scales)[..., None]))
        return {"codes": codes.flatten(-2), "scales": scales.to(torch.uint8)}

    def decode(self, coded: CodedMatrix) -> Tensor:
        exponent = coded["scales"].int() - 127
        scale = torch.ldexp(torch.ones(exponent.shape), exponent)
        return _e2m1.values(coded["codes"]) * spread(scale, coded["codes"], 32)

    def refuse(self, coded: CodedMatrix) -> None:
        if bool((coded["scales"] == 255).any()):
            raise not_finite(self.name, "scale")

    @staticmethod
    def from_blocks(blocks: Tensor, scales: Tensor) -> CodedMatrix:
        """uint8 [rows, K / 32, 16] and [rows, K / 32], as in a checkpoint."""
        return {"codes": _e2m1.unpack(blocks).flatten(-2), "scales": scales}

    @staticmethod
    def to_blocks(coded: CodedMatrix) -> tuple[Tensor, Tensor]:
        """The inverse of `from_blocks`."""
        return blocks_of(_e2m1.pack(coded["codes"]), 16), coded["scales"]


FORMAT = Mxfp4()
