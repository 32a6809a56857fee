"""Expert tiles by batched products: one product per tile, all of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.model_config import Activation
from freetoken.kernels._blocks import to_blocks
from freetoken.kernels.activation import gated

RANK = 0


def supports(device_type: str) -> bool:
    return True


def expert_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down_t: Tensor, activation: Activation, bias: Tensor | None
) -> Tensor:
    rows = _per_tile(x, gate.shape[0]).float()
    g = torch.bmm(rows, gate.float().transpose(1, 2))
    u = torch.bmm(rows, up.float().transpose(1, 2))
    if bias is not None:
        g, u = g + bias[:, :1], u + bias[:, 1:]
    middle = gated(activation, g, u).to(x.dtype).float()
    return torch.bmm(middle, down_t.float())


def expert_mlp_exact(
    x: Tensor, gate: Tensor, up: Tensor, down_t: Tensor, activation: Activation, bias: Tensor | None
) -> Tensor:
    tiles, num_rows, hidden = gate.shape[0], x.shape[-2], x.shape[-1]
    rows = _per_tile(x, tiles)
    blocks = torch.stack([to_blocks(r) for r in rows])  # [n, B, M, H]
    per_block = blocks.shape[1]
    flat = blocks.flatten(0, 1)
    g = torch.bmm(flat, _repeat(gate, per_block).transpose(1, 2))
    u = torch.bmm(flat, _repeat(up, per_block).transpose(1, 2))
    if bias is not None:
        each = _repeat(bias, per_block)
        g, u = g + each[:, :1], u + each[:, 1:]
    out = torch.bmm(gated(activation, g, u), _repeat(down_t, per_block))
    return out.view(tiles, -1, hidden)[:, :num_rows]


def _per_tile(x: Tensor, tiles: int) -> Tensor:
    return x.expand(tiles, *x.shape) if x.dim() == 2 else x


def _repeat(weight: Tensor, times: int) -> Tensor:
    return weight.float().repeat_interleave(times, 0)
