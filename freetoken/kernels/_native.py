"""What the native makers share: type codes, addresses, and when the library is there."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.native.library import library

RANK = 10
_HUGE = 2 << 20
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def supports(device_type: str) -> bool:
    return device_type == "cpu" and library() is not None


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def on_huge_pages(tensor: Tensor) -> Tensor:
    """A copy whose whole 2 MiB runs may lie on huge pages; itself if it is one or too small to matter.

    Walking page tables costs a third of the read bandwidth on a virtual machine (measured: 14 GB/s a thread
    against 22).
    """
    lib = library()
    size = tensor.numel() * tensor.element_size()
    placed_before = tensor.data_ptr() % _HUGE == 0
    if lib is None or size < _HUGE or tensor.device.type != "cpu" or placed_before:
        return tensor
    raw = torch.empty(size + _HUGE, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE
    lib.spread(raw.data_ptr() + start, size)
    lib.advise_huge(raw.data_ptr() + start, size // _HUGE * _HUGE)  # before the first touch
    placed = raw[start : start + size].view(tensor.dtype).view(tensor.shape)
    placed.copy_(tensor)
    return placed
