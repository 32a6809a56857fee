"""A played link by Triton beside its reference. Run by test_triton.py, interpreted and on a card."""

from __future__ import annotations

import pytest
import torch

from freetoken.core.machine import GB, slow_link
from freetoken.core.units import MIB
from freetoken.kernels._triton import INTERPRETED
from freetoken.kernels.slow_link import reference, triton


def booked() -> None:
    """One copy behind the other, as by the reference: there is no timer to wait for."""
    ours, theirs = (torch.tensor(slow_link(12 * GB, 55 * GB)) for _ in range(2))
    for size in (4096, 3 * MIB, 1):
        triton.behind_copy(ours, size)
        reference.behind_copy(theirs, size)
    assert torch.equal(ours, theirs)
    assert int(ours[0]) == pytest.approx((4096 + 3 * MIB) / 12, rel=1e-4)


def waited_for() -> None:
    """No sooner than the played link could, and hardly later."""
    host = torch.empty(24 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    link = torch.tensor(slow_link(1 * GB, 40 * GB), device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    triton.behind_copy(link, 1)
    began.record()
    for _ in range(3):
        there.copy_(host, non_blocking=True)
        triton.behind_copy(link, host.numel())
    ended.record()
    ended.synchronize()
    assert 0.99 < began.elapsed_time(ended) / (3 * 24 * MIB / GB * 1e3) < 1.05


def test_copies_come_at_the_played_links_rate() -> None:
    if INTERPRETED:
        booked()
    else:
        waited_for()
