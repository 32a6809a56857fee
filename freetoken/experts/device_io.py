"""The block that a device writes and the host's poller answers: one allocation, locked, seen by both.

    0     unused     64  request: sequence, layer, num_items, T, top_k     128  reply: done, status, sums
    192   poison     256 items int32 [E, 4], ids int32 [T, k], x [T, H], out float32 [2 T k, H]

Each region starts at a line. `native/poller.h` holds the same map and the ordering argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import Device
from freetoken.core.units import align_up
from freetoken.experts.abi import DTYPES
from freetoken.kernels.expert_step import Io
from freetoken.native.library import DeviceBlock

LINE, HEAD = 64, 256


def make_block(
    device: Device, max_rows: int, top_k: int, hidden: int, num_experts: int, dtype: torch.dtype
) -> Io | None:
    """A block for up to max_rows rows; None if the system refuses to lock it."""
    routes = max_rows * top_k
    sizes = (num_experts * 16, routes * 4, max_rows * hidden * dtype.itemsize, 2 * routes * hidden * 4)
    offsets, at = [], HEAD
    for size in sizes:
        offsets.append(at)
        at = align_up(at + size, LINE)
    raw = torch.zeros(at + 4096, dtype=torch.uint8)
    raw = raw[-raw.data_ptr() % 4096 :][:at]
    address = device.pin(raw)
    if not address:
        return None

    def part(index: int, kind: torch.dtype) -> Tensor:
        return raw[offsets[index] : offsets[index] + sizes[index]].view(kind)

    return Io(
        address=address,
        bytes=raw,
        request=raw[64:128].view(torch.int32),
        reply=raw[128:192].view(torch.int32),
        poison=raw[192:256].view(torch.int32),
        items=part(0, torch.int32).view(num_experts, 4),
        ids=part(1, torch.int32),
        x=part(2, dtype).view(max_rows, hidden),
        out=part(3, torch.float32).view(2 * routes, hidden),
        offsets=(offsets[0], offsets[1], offsets[2], offsets[3]),
    )


def describe(io: Io, max_rows: int, top_k: int, deadline_ms: int) -> DeviceBlock:
    """The native library's view of the block."""
    items, ids, x, out = io.offsets
    return DeviceBlock(
        data=io.bytes.data_ptr(),
        items_offset=items,
        ids_offset=ids,
        x_offset=x,
        out_offset=out,
        hidden=io.x.shape[1],
        x_dtype=DTYPES[io.x.dtype],
        max_rows=max_rows,
        top_k=top_k,
        num_experts=io.items.shape[0],
        deadline_ms=deadline_ms,
    )
