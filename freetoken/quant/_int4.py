"""Four-bit integers in groups along the summed dimension, as AWQ, GPTQ and compressed-tensors make them.

weight = d * whole * (code - zero). Scales are float16; `whole`, a power of two for all of a matrix, gives
scales that come as bfloat16 the exponents which float16 lacks, so nothing is lost. Symmetric: zero is 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import Meaning, Part
from freetoken.quant._levels import LevelFormat


class Int4(LevelFormat):
    """Groups of `group`; with `zeros`, each has a zero of its own."""

    error = 0.13
    adopts = {"d": "scales", "zero": "zeros"}
    halves = ("d", "whole")

    def __init__(self, group: int, zeros: bool) -> None:
        self.name = f"int4_zp_g{group}" if zeros else f"int4_g{group}"
        self.group = self.block = self.columns_multiple = group
        self.affine = zeros
        self.levels = tuple(range(16)) if zeros else tuple(range(-8, 8))
        zero = (Part("zero", torch.uint8, group),) if zeros else ()
        step = ("d", "whole")
        self.meaning = Meaning("uint", step, (*step, "zero")) if zeros else Meaning("uint", step, zero=8)
        self.parts = (Part("d", torch.float16, group), *zero, Part("whole", torch.float32, 0))

    def steps(self, coded: CodedMatrix) -> tuple[Tensor, Tensor | None]:
        step = coded["d"].float() * coded["whole"]
        return step, step * coded["zero"].float() if self.affine else None

    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        parts = self._scales(step.half())
        if self.affine:
            whole = parts["d"].float()
            zero = (least / torch.where(whole > 0, whole, 1.0)).round()
            parts["zero"] = zero.clamp(0, 15).to(torch.uint8)
        return parts

    def from_tensors(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> CodedMatrix:
        """uint8 [rows, K], float [rows, K / group], and zeros uint8 of that shape if there are any."""
        parts = self._scales(scales)
        if self.affine:
            parts["zero"] = torch.full(scales.shape, 8, dtype=torch.uint8) if zeros is None else zeros
        return {"codes": codes, **parts}

    def adopt(self, stored: CodedMatrix) -> CodedMatrix:
        """Scales as a checkpoint has them, in any type, become `d` and `whole`."""
        return self.from_tensors(stored["codes"], stored["scales"], stored.get("zeros"))

    def to_tensors(self, coded: CodedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
        """The inverse; scales as float32."""
        return coded["codes"], coded["d"].float() * coded["whole"], coded.get("zero")

    def _scales(self, scales: Tensor) -> dict[str, Tensor]:
        """d and whole, of which the product is the scales."""
        whole = torch.ones(*scales.shape[:-2], 1, 1)
        d = scales.half()
        if not torch.equal(d.float(), scales.float()) and bool(scales.isfinite().all()):
            largest = scales.abs().float().amax((-1, -2), keepdim=True)
            whole = torch.ldexp(whole, torch.frexp(largest).exponent - 15)
            d = (scales.float() / whole).half()
            if not torch.equal(d.float() * whole, scales.float()):
                raise WeightsError(
                    f"Scales of a {self.name} weight are of more digits or range than float16 has.",
                    code="invalid_weights",
                    hint="Quantise the checkpoint with 16-bit scales.",
                )
        return {"d": d, "whole": whole}
