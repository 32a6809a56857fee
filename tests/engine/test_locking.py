"""Host memory of saved states is locked ahead of its use, where copies need it, and by whole rows."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from freetoken.core.options import Options
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.build import build
from freetoken.engine.locking import AHEAD, PAGE, LockedAhead, page_rows
from freetoken.native.library import library

from .served import Served, text_ids


class Locking(CpuDevice):
    """Copies only from locked memory; the k-th wish to lock some is refused (0: none)."""

    locks_memory = True

    def __init__(self, refuse: int = 0) -> None:
        super().__init__()
        self.refuse, self.pinned, self.slow = refuse, [], threading.Event()
        self.slow.set()

    def pin(self, buffer: torch.Tensor) -> int:
        self.slow.wait()
        if len(self.pinned) + 1 == self.refuse:
            return 0
        self.pinned.append((buffer.data_ptr(), buffer.numel()))
        return buffer.data_ptr()


def settle(locked: LockedAhead, count: int) -> None:
    until = time.monotonic() + 20
    while locked.num_locked != count:
        assert time.monotonic() < until, (locked.num_locked, count)
        time.sleep(0.005)


def test_large_rows_share_no_page_and_small_ones_take_no_more_than_their_bytes():
    rows = page_rows(5, PAGE + 64)
    assert rows.shape == (5, PAGE + 64) and all(row.data_ptr() % PAGE == 0 for row in rows)
    assert page_rows(5, 64).stride() == (64, 1)


def test_rows_are_locked_as_they_come_near():
    device, rows = Locking(), page_rows(40, PAGE)
    locked = LockedAhead(device, rows)
    settle(locked, AHEAD)
    locked.reached(3)
    settle(locked, AHEAD + 3)
    locked.reached(2)
    locked.reached(39)
    settle(locked, 39)
    locked.close()
    assert device.pinned == [(row.data_ptr(), PAGE) for row in rows[1:]]


def test_using_a_row_never_waits_for_locking_and_closing_ends_it():
    device, rows = Locking(), page_rows(40, PAGE)
    device.slow.clear()
    locked = LockedAhead(device, rows)
    locked.reached(30)
    device.slow.set()
    locked.close()
    assert locked.num_locked <= 1 + AHEAD + 30
    locked.close()


def test_a_refusal_ends_the_locking_and_nothing_else():
    device = Locking(refuse=3)
    locked = LockedAhead(device, page_rows(40, PAGE))
    settle(locked, 2)
    locked.reached(20)
    locked.close()
    assert len(device.pinned) == 2


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_populating_keeps_what_is_there():
    rows = page_rows(3, 3 * PAGE)
    rows.fill_(7)
    library().populate(rows[1].data_ptr(), rows[1].numel())
    assert bool((rows == 7).all())


def test_an_engine_saves_its_states_to_locked_memory():
    device = Locking()
    served = Served(build(Options(max_model_len=512, checkpoint_memory=4 << 20), device=device))
    host = served.engine.scheduler.reuse.mover.host
    for number in range(3):
        served.submit(str(number), text_ids(served.built, number, 100), 2, anchors=(40, 80))
        while not served.outputs.get(str(number)) or not served.engine.idle:
            served.step()
    assert served.engine.scheduler.reuse.snapshot()["checkpoints_in_host_memory"] >= 6
    served.built.close()
    assert host.stride(0) % PAGE == 0
    places = {at for at, _ in device.pinned}
    assert {host[slot].data_ptr() for slot in range(1, 7)} <= places
