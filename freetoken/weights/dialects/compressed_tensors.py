"""compressed-tensors (llm-compressor): nvfp4, mxfp4, fp8 and packed integers.

Scales stand beside `weight_packed` or `weight`. The whole-matrix scale of nvfp4 is stored as its
reciprocal; four-bit integers are stored with eight added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.weights.dialect import Dialect, Form, Raw, Scheme, Shapes
from freetoken.weights.dialects import _fp8
from freetoken.weights.dialects._bits import nibbles, same, scalar

_CODES, _SCALE, _WHOLE = ".weight_packed", ".weight_scale", ".weight_global_scale"
_IGNORED = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale")


def _nvfp4(shapes: Shapes, raw: Raw) -> Form:
    *lead, rows, half = shapes[_CODES]
    same("weight_scale", shapes[_SCALE], (*lead, rows, half // 8))
    return Form("nvfp4", (*lead, rows, 2 * half))


def _nvfp4_codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    return {"codes": nibbles(t[_CODES]), "scales": t[_SCALE], "whole": 1.0 / scalar(t[_WHOLE])}


def _mxfp4(shapes: Shapes, raw: Raw) -> Form:
    *lead, rows, half = shapes[_CODES]
    same("weight_scale", shapes[_SCALE], (*lead, rows, half // 16))
    return Form("mxfp4", (*lead, rows, 2 * half))


def _mxfp4_codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    return {"codes": nibbles(t[_CODES]), "scales": t[_SCALE].view(torch.uint8)}


_NVFP4 = Scheme(
    {_CODES: (torch.uint8,), _SCALE: (torch.float8_e4m3fn,), _WHOLE: (torch.float32,)},
    _nvfp4,
    _nvfp4_codes,
    ignores=_IGNORED,
)
_MXFP4 = Scheme(
    {_CODES: (torch.uint8,), _SCALE: (torch.uint8, torch.float8_e8m0fnu)},
    _mxfp4,
    _mxfp4_codes,
    ignores=_IGNORED,
)
DIALECT = Dialect(
    methods=("compressed-tensors",),
    schemes=(_NVFP4, _MXFP4, _fp8.scheme(_SCALE, _IGNORED)),
    ignored=(*_IGNORED, ".k_scale", ".v_scale"),
)
