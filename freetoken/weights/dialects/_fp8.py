"""fp8 (e4m3) matrices as all tools store them: codes in `weight`, scales of 128 x 128 blocks or one for all.

Tools differ in the scale's name and shape only. weight = code * scale, whatever the name says of an inverse.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.units import ceil_div
from freetoken.core.weights import CodedMatrix
from freetoken.weights.dialect import Form, Raw, Scheme, Shapes, Unreadable

SIDE = 128
WEIGHT = ".weight"
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def scheme(scale: str, ignores: tuple[str, ...]) -> Scheme:
    """fp8 codes in `weight` with their scales under the role `scale`."""

    def form(shapes: Shapes, raw: Raw) -> Form:
        shape = shapes[WEIGHT]
        return Form(_format(shape, shapes[scale]), shape)

    def codes(tensors: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
        weight = tensors[WEIGHT]
        return {"codes": weight.view(torch.uint8), "scales": _spread(tensors[scale].float(), weight)}

    needs = {WEIGHT: (torch.float8_e4m3fn,), scale: _SCALES}
    return Scheme(needs, form, codes, ignores=ignores)


def _format(shape: tuple[int, ...], scale: tuple[int, ...]) -> str:
    blocks = _blocks(shape)
    squeezed = tuple(n for n in scale if n != 1)
    if _numel(scale) == 1 or squeezed == tuple(n for n in blocks if n != 1):
        return "fp8_block"
    raise Unreadable(
        f"its scales have shape {list(scale)}, read are one, or {list(blocks)} for 128 x 128 blocks"
    )


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, ceil_div(rows, SIDE), ceil_div(columns, SIDE))


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _spread(scales: Tensor, weight: Tensor) -> Tensor:
    """Scales as one per block, whatever axes of one the tool has put between."""
    blocks = _blocks(tuple(weight.shape))
    return scales.reshape(()).expand(blocks) if scales.numel() == 1 else scales.reshape(blocks)
