"""Q8_0: signed bytes, one float16 scale for every 32 elements along the summed dimension (GGUF)."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part, blocks_of, spread
from freetoken.quant._gguf import GgufFormat, Raw


class Q8_0(GgufFormat):
    name = "q8_0"
    block = 32
    planes = (8,)
    words = False
    parts = (Part("scales", torch.float16, 32),)
    error = 0.006
    meaning = Meaning("int8", ("scales",))
    gguf_type, gguf_columns = 8, 32
    fields = (Raw("scales", 2, torch.float16), Raw("codes", 32, torch.uint8))

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 32)
        scales = (blocks.abs().amax(-1) / 127.0).to(torch.float16)
        step = scales.float()
        codes = (blocks / torch.where(step > 0, step, 1.0)[..., None]).round().clamp(-127, 127)
        return {"codes": codes.flatten(-2).to(torch.int8).view(torch.uint8), "scales": scales}

    def decode(self, coded: CodedMatrix) -> Tensor:
        codes = coded["codes"].contiguous().view(torch.int8).float()
        return codes * spread(coded["scales"].float(), codes, 32)


FORMAT = Q8_0()
