"""fp8 (e4m3) matrices as all tools store them: codes in `weight`; scales of all, rows or 128 x 128 blocks.

Tools differ in the scale's name and shape only. weight = code * scale, whatever the name says of an inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from freetoken.core.units import ceil_div
from freetoken.core.weights import CodedMatrix, Lies
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
        weight, scales = tensors[WEIGHT], tensors[scale].float()
        shape = _SHAPES[_format(tuple(weight.shape), tuple(scales.shape))](tuple(weight.shape))
        return {"codes": weight.view(torch.uint8), "scales": scales.reshape(shape)}

    needs = {WEIGHT: (torch.float8_e4m3fn,), scale: _SCALES}
    lies = {WEIGHT: Lies("codes"), scale: Lies("scales")}
    return Scheme(needs, form, codes, ignores=ignores, lies=lambda raw: lies)


def _format(shape: tuple[int, ...], scale: tuple[int, ...]) -> str:
    """The format whose scales have that shape, but for axes of one."""
    bare = tuple(n for n in scale if n != 1)
    for name, wanted in _SHAPES.items():
        if bare == tuple(n for n in wanted(shape) if n != 1):
            return name
    read = ", ".join(f"{list(wanted(shape))}" for wanted in _SHAPES.values())
    raise Unreadable(f"its scales have shape {list(scale)}, read are {read}")


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, ceil_div(rows, SIDE), ceil_div(columns, SIDE))


_SHAPES: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "fp8_tensor": lambda shape: (*shape[:-2], 1, 1),
    "fp8_channel": lambda shape: (*shape[:-1], 1),
    "fp8_block": _blocks,
}
