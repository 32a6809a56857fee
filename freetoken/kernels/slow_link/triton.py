"""One warp behind a copy that waits on the device's timer: the host doesn't, and copies stay in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freetoken.kernels._slow_link import await_bytes, book, now
from freetoken.kernels._triton import Card, Launch, constexpr, jit, tl
from freetoken.kernels._triton import supports as supports

RANK = 20
LATE_NS = constexpr(20_000)
"""Most that lies between a copy's end and this kernel's start: it is not waited for beside the link."""


@jit(varying=("num_bytes",))
def wait_behind(link, num_bytes):
    took = (tl.cast(num_bytes, tl.int64) * tl.load(link + 3)) >> 20
    await_bytes(link, book(link, now() - took - LATE_NS, num_bytes, 1).to(tl.int32))


def behind_copy(link: Tensor, num_bytes: int) -> None:
    launch(link, num_bytes)()


def launch(link: Tensor, num_bytes: int) -> Launch:
    return Launch(wait_behind, (1,), (link, num_bytes), warps=1)


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    yield lambda where: [launch(torch.empty(4, dtype=torch.int64, device="meta"), 1 << 20)]
