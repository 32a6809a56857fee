"""The bank's memory: aligned, spread over memory nodes, and in huge pages as soon as that costs nothing.

Reading through huge pages saves page walks. On most machines they are also the cheapest to touch first. A
virtual machine whose host gives memory on first touch takes milliseconds for each (measured: 3 s for a GiB):
there the bank begins with small pages, which mostly are there, and is gathered once it is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from freetoken.native.library import library

HUGE = 2 << 20
LEAST_BYTES = 64 << 20
PROBED = 32
GATHERED = 8 * HUGE
SLOW_S = 0.0006
"""Touching a huge page takes a quarter of that where memory is there."""


def allocate(num_bytes: int, align: int) -> tuple[Tensor, bool]:
    """uint8 [num_bytes], not initialised, and whether it should be gathered when it is full."""
    raw = torch.empty(num_bytes + max(align, HUGE), dtype=torch.uint8)
    lib = library()
    if lib is None or num_bytes < LEAST_BYTES:
        start = -raw.data_ptr() % align
        return raw[start : start + num_bytes], False
    start = -raw.data_ptr() % HUGE
    memory = raw[start : start + num_bytes]
    lib.spread(memory.data_ptr(), num_bytes)
    probe = memory[: PROBED * HUGE]
    if not lib.advise_huge(probe.data_ptr(), probe.numel()):
        return memory, False
    spent = 0.0
    for at in range(0, probe.numel(), HUGE):  # a few may be warm from an earlier use
        began = time.thread_time()
        probe[at : at + HUGE].zero_()
        spent += time.thread_time() - began
        if spent > PROBED * SLOW_S:
            break
    slow = spent > PROBED * SLOW_S
    if not slow:
        lib.advise_huge(memory.data_ptr(), num_bytes)
    return memory, slow


def gather(memory: Tensor, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Move memory in use into huge pages, in place, a little at a time so that readers hardly wait."""
    lib = library()
    if lib is None:
        return False
    for at in range(0, memory.numel(), GATHERED):
        part = memory[at : at + GATHERED]
        if stopped() or not lib.collapse(part.data_ptr(), part.numel()):
            return False
    return True
