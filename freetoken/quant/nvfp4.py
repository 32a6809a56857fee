"""NVFP4: e2m1 codes, an e4m3 scale for every 16 elements along the summed dimension, one float32 for all.

weight = code * scale * whole. Stored as `weight_packed` (low nibble first), `weight_scale`, `weight_scale_2`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import CodedMatrix
from freetoken.quant import _e2m1
from freetoken.quant._coded import CodedFormat, Meaning, Part, blocks_of, spread

_MOST = 448.0 * 6.0


class Nvfp4(CodedFormat):
    name = "nvfp4"
    block = 16
    parts = (Part("scales", torch.float8_e4m3fn, 16), Part("whole", torch.float32, 0))
    error = 0.25
    meaning = Meaning("e2m1", ("scales", "whole"))

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, 16)
        largest = blocks.abs().amax(-1)
        whole = (largest.amax((-1, -2), keepdim=True) / _MOST).clamp(min=1e-30)
        scales = (largest / 6.0 / whole).clamp(max=448.0).to(torch.float8_e4m3fn)
        step = scales.float() * whole
        codes = _e2m1.nearest(blocks / torch.where(step > 0, step, 1.0)[..., None])
        codes = torch.where((step > 0)[..., None], codes, 0).to(torch.uint8)
        return {"codes": codes.flatten(-2), "scales": scales, "whole": whole}

    def decode(self, coded: CodedMatrix) -> Tensor:
        scale = coded["scales"].float() * coded["whole"]
        return _e2m1.values(coded["codes"]) * spread(scale, coded["codes"], 16)

    @staticmethod
    def from_packed(packed: Tensor, scales: Tensor, whole: Tensor) -> CodedMatrix:
        """uint8 [rows, K / 2], e4m3 [rows, K / 16], float32 scalar, as in a checkpoint."""
        return {"codes": _e2m1.unpack(packed), "scales": scales, "whole": whole.float().reshape(1, 1)}

    @staticmethod
    def to_packed(coded: CodedMatrix) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of `from_packed`."""
        return _e2m1.pack(coded["codes"]), coded["scales"], coded["whole"]


FORMAT = Nvfp4()
