"""compressed-tensors (llm-compressor): nvfp4, mxfp4, fp8 and packed integers.

Scales stand beside `weight_packed` or `weight`. The whole-matrix scale of nvfp4 is stored as its
reciprocal; four-bit integers are stored with eight added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freetoken.core.units import ceil_div
from freetoken.core.weights import FIELDS, NIBBLES, SORTED, CodedMatrix, Lies
from freetoken.weights.dialect import Dialect, Form, Missing, Raw, Scheme, Shapes
from freetoken.weights.dialects import _fp8, _int4
from freetoken.weights.dialects._bits import fields, nibbles, same, scalar

_CODES, _SCALE, _WHOLE = ".weight_packed", ".weight_scale", ".weight_global_scale"
_ZERO, _ORDER = ".weight_zero_point", ".weight_g_idx"
_ASYMMETRIC = {_ZERO: "its codes have a zero point, which this format has not"}
_LIES = {
    _CODES: Lies("codes", NIBBLES),
    _SCALE: Lies("scales"),
    _WHOLE: Lies("whole", inverse=True),
    _ZERO: Lies("zeros", FIELDS),
    _ORDER: Lies(SORTED),
}
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


def _settings(raw: Raw) -> list[Mapping[str, Any]]:
    """What the config says of weights, a mapping for each of its groups."""
    groups = raw.get("config_groups")
    found = [one.get("weights") for one in groups.values()] if isinstance(groups, Mapping) else []
    return [one for one in found if isinstance(one, Mapping)]


def _int4_form(shapes: Shapes, raw: Raw) -> Form:
    ints = [one for one in _settings(raw) if one.get("type", "int") == "int"]
    for bits in {one.get("num_bits", 4) for one in ints}:
        _int4.only_four(bits)
    for key, value, role in (("symmetric", False, _ZERO), ("actorder", "group", _ORDER)):
        if ints and role not in shapes and all(one.get(key) == value for one in ints):
            raise Missing(role)
    rows, words = shapes[_CODES]
    groups = shapes[_SCALE][-1]
    wanted = {_SCALE: (rows, groups), _ZERO: (ceil_div(rows, 8), groups), _ORDER: (8 * words,)}
    for role in wanted.keys() & shapes.keys():
        same(role.removeprefix("."), shapes[role], wanted[role])
    return _int4.form((rows, 8 * words), groups, zeros=_ZERO in shapes)


def _int4_codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    codes = fields(t[_CODES], 4, axis=-1)
    zeros = fields(t[_ZERO], 4, axis=0) if _ZERO in t else None
    return _int4.coded(codes, t[_SCALE], zeros, t.get(_ORDER))


_NVFP4 = Scheme(
    {_CODES: (torch.uint8,), _SCALE: (torch.float8_e4m3fn,), _WHOLE: (torch.float32,)},
    _nvfp4,
    _nvfp4_codes,
    ignores=_IGNORED,
    refuses=_ASYMMETRIC,
    lies=lambda raw: _LIES,
)
_MXFP4 = Scheme(
    {_CODES: (torch.uint8,), _SCALE: (torch.uint8, torch.float8_e8m0fnu)},
    _mxfp4,
    _mxfp4_codes,
    ignores=_IGNORED,
    refuses=_ASYMMETRIC,
    lies=lambda raw: _LIES,
)
_INT4 = Scheme(
    {_CODES: (torch.int32,), _SCALE: (torch.bfloat16, torch.float16, torch.float32)},
    _int4_form,
    _int4_codes,
    may=(_ZERO, _ORDER),
    groups=_ORDER,
    ignores=(*_IGNORED, ".weight_shape"),
    lies=lambda raw: _LIES,
)
DIALECT = Dialect(
    methods=("compressed-tensors",),
    schemes=(_NVFP4, _MXFP4, _INT4, _fp8.scheme(_SCALE, _IGNORED)),
    ignored=(*_IGNORED, ".k_scale", ".v_scale"),
)
