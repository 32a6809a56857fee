"""Pools over reserved ranges: addresses stay, new units are zero, every failure leaves all as it was."""

from __future__ import annotations

import sys

import pytest
import torch

from freetoken.core.errors import CapacityError, FreeTokenError
from freetoken.core.interfaces import Faults
from freetoken.core.units import MIB
from freetoken.devices._arena import ArenaPool
from freetoken.devices._driver import Driver
from freetoken.devices._nvml import Nvml
from freetoken.devices._pool import Ledger

from .fake_driver import FakeLibrary

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
UNIT = 3 * MIB // 2


def made(library: FakeLibrary, units: int = 3, limit: int = 256 * MIB) -> tuple[ArenaPool, Ledger]:
    ledger = Ledger(limit, Faults())
    where = (Driver(library), torch.device("cpu", 0))
    return ArenaPool("experts", UNIT, units, (1, 40), ledger, where), ledger


def test_units_keep_their_address_and_bytes_while_the_pool_grows_and_shrinks() -> None:
    library = FakeLibrary()
    pool, ledger = made(library)
    base = pool.base
    pool.view()[1].fill_(7)
    for units in (20, 2, 9):
        pool.resize(units)
        assert pool.base == base == pool.view().data_ptr() and pool.num_units == units
        assert (pool.view()[1] == 7).all() and not pool.view()[2:].any()
        assert ledger.mapped["experts"] == sum(library.handles.values()) >= units * UNIT
        pool.view()[2:].fill_(9)
    pool.close()
    assert not library.handles and not library.mapped and not library.reserved and not ledger.mapped


@pytest.mark.parametrize("call", range(1, 28))
def test_a_failure_in_any_call_of_a_growth_leaves_all_as_it_was(call: int) -> None:
    library = FakeLibrary()
    pool, ledger = made(library)
    pool.view().fill_(5)
    before = dict(library.handles), dict(library.mapped), dict(ledger.mapped)
    library.fail_in = call
    with pytest.raises(FreeTokenError):
        pool.resize(15)
    assert (library.handles, library.mapped, ledger.mapped) == before
    assert pool.num_units == 3 and (pool.view() == 5).all()
    pool.resize(15)
    assert (pool.view()[:3] == 5).all() and not pool.view()[3:].any()
    pool.close()


@pytest.mark.parametrize("call", range(1, 7))
def test_a_pool_that_can_not_be_made_leaves_nothing_behind(call: int) -> None:
    library = FakeLibrary()
    library.fail_in = call
    with pytest.raises(FreeTokenError):
        made(library)
    assert not library.handles and not library.mapped and not library.reserved


def test_a_full_card_and_a_full_ledger_are_told_apart() -> None:
    pool, _ = made(FakeLibrary(room=8 * MIB))
    with pytest.raises(CapacityError, match="no memory left"):
        pool.resize(30)
    pool, _ = made(FakeLibrary(), limit=8 * MIB)
    with pytest.raises(CapacityError, match="but the device has"):
        pool.resize(30)
    with pytest.raises(CapacityError) as caught:
        pool.resize(41)
    assert caught.value.code == "pool_bounds"


class FakeNvml:
    """Two cards; the second one doesn't answer."""

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, uuid, size) -> int:
        uuid.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        memory._obj.used = 5 * MIB
        return int(handle.value == 2)


def test_cards_that_do_not_answer_are_left_out() -> None:
    assert Nvml(FakeNvml()).used_bytes() == {"GPU-1": 5 * MIB}
