"""Coded records to uncoded ones: what a prompt's products read when an expert meets many rows.

    expand_records(records, coded, out, dtype)
        records  int64 [n]        addresses of coded records: slots, ring buffers, mapped host rows
        coded    core.codes.Coded  where things lie and what they mean
        out      uint8 [n, bytes] contiguous, at least coded.plain_bytes()[0] each   (mutated)
        dtype    bfloat16 or float16

A weight is computed in float32 and rounded once to dtype: exact for mxfp4, whose weights bfloat16 holds;
elsewhere half a unit in the last place, as if the checkpoint had been in dtype. Biases are copied. No sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.codes import Coded
from freetoken.kernels._choose import choose
from freetoken.kernels.expand_records import reference, triton

MAKERS = (reference, triton)


def expand_records(records: Tensor, coded: Coded, out: Tensor, dtype: torch.dtype) -> None:
    choose(MAKERS, out.device.type).expand_records(records, coded, out, dtype)
