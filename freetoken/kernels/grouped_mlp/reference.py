"""Grouped experts one after the other, from records in this process's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.expert_mlp import expert_mlp, sum_tiles
from freetoken.kernels.grouped_mlp._types import Routes

RANK = 0
_BLOCK = 16


def supports(device_type: str) -> bool:
    return True


def sort_routes(ids: Tensor, num_experts: int) -> Routes:
    flat = ids.flatten().long()
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    blocks = -(-counts // _BLOCK)
    first = torch.zeros(num_experts + 1, dtype=torch.int64)
    first[1:] = blocks.cumsum(0)
    order = torch.full((int(first[-1]) * _BLOCK,), -1, dtype=torch.int32)
    place = torch.full((flat.numel(),), -1, dtype=torch.int32)
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten()
        start = int(first[expert]) * _BLOCK
        order[start : start + len(mine)] = mine.int()
        place[mine] = torch.arange(start, start + len(mine), dtype=torch.int32)
    owner = torch.arange(num_experts).repeat_interleave(blocks)
    return Routes(ids, order, place, first.int(), owner.int(), _BLOCK, num_experts)


def grouped_mlp(
    x: Tensor,
    routes: Routes,
    weights: Tensor,
    records: Tensor,
    form: Any,
    span: tuple[int, int],
    out: Tensor,
) -> None:
    for expert in range(*span):
        token, rank = (routes.ids == expert).nonzero(as_tuple=True)
        if len(token):
            y = _expert(x[token], int(records[expert]), form)
            out[token] += weights[token, rank, None] * y


def _expert(x: Tensor, address: int, form: Any) -> Tensor:
    tiles, width, hidden = form.expert_size // form.tile_width, form.tile_width, form.hidden
    total = form.tiles_offset + tiles * form.tile_bytes
    raw = torch.frombuffer((ctypes.c_uint8 * total).from_address(address), dtype=torch.uint8)
    each = raw[form.tiles_offset :].view(tiles, form.tile_bytes)
    parts = each[:, : 3 * width * hidden * x.itemsize].contiguous().view(x.dtype)
    gate, up, down_t = parts.view(tiles, 3, width, hidden).unbind(1)
    if not form.bias_offset:
        return sum_tiles(expert_mlp(x, gate, up, down_t, form.activation))
    bias = each[:, form.bias_offset : form.bias_offset + 8 * width].contiguous().view(torch.float32)
    y = sum_tiles(expert_mlp(x, gate, up, down_t, form.activation, bias.view(tiles, 2, width)))
    return y + raw[: 4 * hidden].view(torch.float32)
