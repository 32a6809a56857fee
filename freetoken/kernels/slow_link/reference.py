"""Books a copy's bytes; there is no timer to wait for."""

from __future__ import annotations

from torch import Tensor

RANK = 0


def supports(device_type: str) -> bool:
    return True


def behind_copy(link: Tensor, num_bytes: int) -> None:
    link[0] += num_bytes * link[1] >> 20
