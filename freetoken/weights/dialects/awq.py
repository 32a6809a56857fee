"""AWQ (AutoAWQ, version `gemm`): `qweight` and `qzeros` packed along the rows, eight a word, shuffled.

weight = scale * (code - zero). The scaling of inputs that the method searches lies in other weights already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import SHUFFLED, CodedMatrix, Lies
from freetoken.weights.dialect import Dialect, Form, Raw, Scheme, Shapes, Unreadable
from freetoken.weights.dialects import _int4
from freetoken.weights.dialects._bits import fields, same

_CODES, _ZEROS, _SCALES = ".qweight", ".qzeros", ".scales"
# Where in a word each of eight neighbours lies, lowest field first.
_FIELD_OF = (0, 4, 1, 5, 2, 6, 3, 7)


def _form(shapes: Shapes, raw: Raw) -> Form:
    groups, rows = shapes[_SCALES]
    _int4.only_four(32 * shapes[_ZEROS][-1] / max(rows, 1))
    same("qzeros", shapes[_ZEROS], (groups, rows // 8))
    same("qweight", shapes[_CODES], (shapes[_CODES][0], rows // 8))
    return _int4.form((rows, shapes[_CODES][0]), groups, zeros=True)


def _codes(t: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    return _int4.coded(_apart(t[_CODES]).t(), t[_SCALES].t(), _apart(t[_ZEROS]).t(), None)


def _apart(words: Tensor) -> Tensor:
    return fields(words, 4, axis=-1).unflatten(-1, (-1, 8))[..., _FIELD_OF].flatten(-2)


def _check(raw: Raw) -> None:
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise Unreadable(f"version is {version!r}, read is 'gemm'")


_LIES = {
    _CODES: Lies("codes", SHUFFLED, turned=True),
    _ZEROS: Lies("zeros", SHUFFLED, turned=True),
    _SCALES: Lies("scales", turned=True),
}
_INTS, _FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
DIALECT = Dialect(
    methods=("awq",),
    schemes=(
        Scheme({_CODES: _INTS, _ZEROS: _INTS, _SCALES: _FLOATS}, _form, _codes, lies=lambda raw: _LIES),
    ),
    check=_check,
)
