"""GPTQ (AutoGPTQ, GPTQModel, AutoRound's export): `qweight` packed along K, `qzeros` along the rows.

weight = scale * (code - zero). The first version of the format stores zeros less one; `checkpoint_format`
tells. `g_idx` names each column's group: act-order scatters them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import EIGHTS, FIELDS, NIBBLES, SORTED, CodedMatrix, Lies
from freetoken.weights.dialect import Dialect, Form, Missing, Raw, Scheme, Shapes, Unreadable
from freetoken.weights.dialects import _int4
from freetoken.weights.dialects._bits import fields, same

_CODES, _ZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
_MIDDLE = 8


def _symmetric(raw: Raw) -> bool:
    return bool(raw.get("sym", True))


def _form(shapes: Shapes, raw: Raw) -> Form:
    groups, rows = shapes[_SCALES]
    _int4.only_four(32 * shapes[_ZEROS][-1] / max(rows, 1))
    same("qzeros", shapes[_ZEROS], (groups, rows // 8))
    same("qweight", shapes[_CODES], (shapes[_CODES][0], rows))
    if raw.get("desc_act") and _GROUPS not in shapes:
        raise Missing(_GROUPS)
    if _GROUPS in shapes:
        same("g_idx", shapes[_GROUPS], (8 * shapes[_CODES][0],))
    return _int4.form((rows, 8 * shapes[_CODES][0]), groups, zeros=not _symmetric(raw))


def _codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    codes = fields(t[_CODES], 4, axis=0).t()
    zeros = fields(t[_ZEROS], 4, axis=-1).t()
    zeros = zeros + _less(raw)
    if _symmetric(raw):
        if not bool((zeros == _MIDDLE).all()):
            raise Unreadable(f"it says to be symmetric, but has zeros other than {_MIDDLE}")
        return _int4.coded(codes, t[_SCALES].t(), None, t.get(_GROUPS))
    return _int4.coded(codes, t[_SCALES].t(), zeros, t.get(_GROUPS))


def _less(raw: Raw) -> int:
    return int(raw.get("checkpoint_format", "gptq") == "gptq")


def _lies(raw: Raw) -> Mapping[str, Lies]:
    zeros = EIGHTS if _symmetric(raw) else "zeros"
    return {
        _CODES: Lies("codes", NIBBLES, turned=True),
        _ZEROS: Lies(zeros, FIELDS, turned=True, less=_less(raw)),
        _SCALES: Lies("scales", turned=True),
        _GROUPS: Lies(SORTED),
    }


def _check(raw: Raw) -> None:
    known = ("gptq", "gptq_v2")
    if raw.get("checkpoint_format", "gptq") not in known:
        raise Unreadable(f"checkpoint_format is {raw['checkpoint_format']!r}, read are {', '.join(known)}")


_INTS, _FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
DIALECT = Dialect(
    methods=("gptq",),
    schemes=(
        Scheme(
            {_CODES: _INTS, _ZEROS: _INTS, _SCALES: _FLOATS},
            _form,
            _codes,
            may=(_GROUPS,),
            groups=_GROUPS,
            lies=_lies,
        ),
    ),
    check=_check,
)
