"""Four-bit integers in groups along the summed dimension: what AWQ, GPTQ and compressed-tensors share.

Owns the names of the formats by group and zero, groups wider than any format has (their scales are
repeated), and sorting columns under act-order. Scales go on as stored: the format takes them in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.weights.dialect import Form, Unreadable, order_of

GROUPS = (32, 64, 128)


def form(shape: tuple[int, ...], num_groups: int, *, zeros: bool) -> Form:
    """The format of a matrix [.., rows, K] with `num_groups` groups a row."""
    columns = shape[-1]
    if not num_groups or columns % num_groups:
        raise Unreadable(f"{columns} columns don't divide into {num_groups} groups")
    group = _kept(columns // num_groups)
    if group not in GROUPS:
        raise Unreadable(
            f"its groups are {columns // num_groups} wide, read are {', '.join(map(str, GROUPS))}"
        )
    return Form(f"int4_zp_g{group}" if zeros else f"int4_g{group}", shape)


def _kept(group: int) -> int:
    """The group that a format has: wider ones are the widest, several times over."""
    return GROUPS[-1] if group % GROUPS[-1] == 0 else group


def coded(codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None) -> CodedMatrix:
    """The matrix [rows, K] in codes; `group_of` int [K] names each column's group under act-order.

    Columns whose groups lie scattered are sorted; `DialectSource.columns` says where each one belongs.
    """
    group = codes.shape[-1] // scales.shape[-1]
    order = None if group_of is None else order_of(group_of)
    if group_of is not None and order is not None:
        if not bool((torch.bincount(group_of.long(), minlength=scales.shape[-1]) == group).all()):
            raise Unreadable("its groups under act-order differ in size")
        codes = codes[..., order]
    parts = {"codes": codes}
    times = group // _kept(group)
    parts["scales"] = scales.repeat_interleave(times, -1) if times > 1 else scales
    if zeros is not None:
        parts["zeros"] = zeros.repeat_interleave(times, -1) if times > 1 else zeros
    return parts


def only_four(bits: float) -> None:
    if bits != 4:
        raise Unreadable(f"its integers have {bits:g} bits, read are those of 4")
