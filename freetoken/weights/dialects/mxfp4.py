"""mxfp4 as gpt-oss publishes it: experts stacked, `<name>_blocks` of 16 bytes and `<name>_scales` (e8m0).

The matrix keeps the stored order [.., rows, K], K being the summed dimension, under the bare name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.weights.dialect import Dialect, Form, Raw, Scheme, Shapes, Unreadable
from freetoken.weights.dialects._bits import nibbles, same

_BLOCKS, _SCALES = "_blocks", "_scales"


def _form(shapes: Shapes, raw: Raw) -> Form:
    shape = shapes[_BLOCKS]
    if len(shape) < 3 or shape[-1] != 16:
        raise Unreadable(f"blocks have shape {list(shape)}, read are [.., rows, K / 32, 16]")
    same("its scales", shapes[_SCALES], shape[:-1])
    return Form("mxfp4", (*shape[:-2], shape[-2] * 32))


def _codes(tensors: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    return {"codes": nibbles(tensors[_BLOCKS]).flatten(-2), "scales": tensors[_SCALES].view(torch.uint8)}


_TYPES = (torch.uint8, torch.float8_e8m0fnu)
DIALECT = Dialect(
    methods=("mxfp4",),
    schemes=(Scheme({_BLOCKS: (torch.uint8,), _SCALES: _TYPES}, _form, _codes, plain=""),),
)
