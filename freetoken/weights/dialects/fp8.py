"""fp8 as DeepSeek and Qwen publish it: `weight_scale_inv` of 128 x 128 blocks; also one scale for all."""

from __future__ import annotations

from freetoken.weights.dialect import Dialect, Raw, Unreadable
from freetoken.weights.dialects import _fp8

_IGNORED = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")


def _check(raw: Raw) -> None:
    block = raw.get("weight_block_size")
    if block not in (None, [_fp8.SIDE, _fp8.SIDE]):
        raise Unreadable(f"weight_block_size is {block}, read is [{_fp8.SIDE}, {_fp8.SIDE}]")
    if raw.get("fmt", "e4m3") != "e4m3":
        raise Unreadable(f"fmt is {raw['fmt']}, read is e4m3")


DIALECT = Dialect(
    methods=("fp8",),
    schemes=(_fp8.scheme(".weight_scale_inv", _IGNORED), _fp8.scheme(".weight_scale", _IGNORED)),
    ignored=_IGNORED,
    check=_check,
)
