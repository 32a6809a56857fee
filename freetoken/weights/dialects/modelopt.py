"""ModelOpt: nvfp4 (`weight`, `weight_scale`, `weight_scale_2`) and fp8, mixed per module.

What a module is shows in its tensors; the config's lists of layers are not needed. Activations stay 16
bit here, so their scales are not read; weights rescaled for them (AWQ) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import NIBBLES, CodedMatrix, Lies
from freetoken.weights.dialect import Dialect, Form, Raw, Scheme, Shapes, Unreadable
from freetoken.weights.dialects import _fp8
from freetoken.weights.dialects._bits import nibbles, one, same, scalar

_WEIGHT, _SCALE, _WHOLE = ".weight", ".weight_scale", ".weight_scale_2"
_IGNORED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".k_bias", ".v_bias")
_REFUSES = {".pre_quant_scale": "its input is rescaled (AWQ), which is not read"}


def _form(shapes: Shapes, raw: Raw) -> Form:
    *lead, rows, half = shapes[_WEIGHT]
    same("weight_scale", shapes[_SCALE], (*lead, rows, half // 8))
    if not one(shapes[_WHOLE][len(lead) :]):
        raise Unreadable(f"weight_scale_2 has shape {list(shapes[_WHOLE])}, read is one number a matrix")
    return Form("nvfp4", (*lead, rows, 2 * half))


def _codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    return {"codes": nibbles(t[_WEIGHT]), "scales": t[_SCALE], "whole": scalar(t[_WHOLE])}


_NVFP4 = Scheme(
    {_WEIGHT: (torch.uint8,), _SCALE: (torch.float8_e4m3fn,), _WHOLE: (torch.float32,)},
    _form,
    _codes,
    ignores=_IGNORED,
    refuses=_REFUSES,
    lies=lambda raw: {_WEIGHT: Lies("codes", NIBBLES), _SCALE: Lies("scales"), _WHOLE: Lies("whole")},
)
DIALECT = Dialect(
    methods=("modelopt", "modelopt_fp4", "modelopt_mixed"),
    schemes=(_NVFP4, _fp8.scheme(_SCALE, _IGNORED)),
    ignored=_IGNORED,
)
