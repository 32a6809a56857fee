"""mxfp4 as gpt-oss publishes it: experts stacked, `<name>_blocks` of 16 bytes and `<name>_scales` (e8m0).

The matrix keeps the stored order [.., rows, K], K being the summed dimension, under the bare name. It goes on
as blocks of another order, the scale first, whose halves share bytes: those are cut into tiles natively.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.core.weights import BLOCKS, NIBBLES, CodedMatrix, Lies
from freetoken.weights.dialect import Dialect, Form, Raw, Scheme, Shapes, Unreadable
from freetoken.weights.dialects._bits import same

_BLOCKS, _SCALES = "_blocks", "_scales"


def _form(shapes: Shapes, raw: Raw) -> Form:
    shape = shapes[_BLOCKS]
    if len(shape) < 3 or shape[-1] != 16:
        raise Unreadable(f"blocks have shape {list(shape)}, read are [.., rows, K / 32, 16]")
    same("its scales", shapes[_SCALES], shape[:-1])
    return Form("mxfp4", (*shape[:-2], shape[-2] * 32))


def _codes(tensors: Mapping[str, Tensor], raw: Raw) -> CodedMatrix:
    """Byte i holds elements 2 i and 2 i + 1 of 32; byte j of the result elements j and j + 16."""
    stored = tensors[_BLOCKS]
    low, high = stored[..., :8], stored[..., 8:]
    out = torch.empty((*stored.shape[:-1], 17), dtype=torch.uint8)
    out[..., 0] = tensors[_SCALES].view(torch.uint8)
    out[..., 1::2] = low & 15 | high << 4
    out[..., 2::2] = low >> 4 | high & 0xF0
    shape = torch.empty((*stored.shape[:-2], stored.shape[-2] * 32), dtype=torch.uint8, device="meta")
    return {BLOCKS: out.flatten(-2), "codes": shape}


_TYPES = (torch.uint8, torch.float8_e8m0fnu)
_LIES = {_BLOCKS: Lies("codes", NIBBLES), _SCALES: Lies("scales")}
DIALECT = Dialect(
    methods=("mxfp4",),
    schemes=(
        Scheme({_BLOCKS: (torch.uint8,), _SCALES: _TYPES}, _form, _codes, lies=lambda raw: _LIES, plain=""),
    ),
)
