"""Units are handed out once, come back once, and survive a shrink under new names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.cache.pages import UnitAllocator
from freetoken.core.errors import CapacityError


def test_unit_zero_is_never_handed_out():
    assert 0 not in UnitAllocator("pages", 5).take(4)


def test_taking_too_many_takes_none():
    a = UnitAllocator("pages", 5)
    with pytest.raises(CapacityError):
        a.take(5)
    assert a.num_free == 4


def test_giving_back_twice_is_an_error():
    a = UnitAllocator("pages", 5)
    ids = a.take(1)
    a.give_back(ids)
    with pytest.raises(KeyError):
        a.give_back(ids)


@given(st.integers(1, 20), st.data())
def test_a_shrink_renames_live_units_and_loses_none(size, data):
    a = UnitAllocator("pages", size + 1)
    live = a.take(data.draw(st.integers(0, size)))
    gone = data.draw(st.sets(st.sampled_from(live))) if live else set()
    a.give_back(gone)
    kept = [u for u in live if u not in gone]
    new = data.draw(st.integers(1, size + 1))
    try:
        src, dst = a.plan_shrink(new)
    except CapacityError:
        assert len(kept) > new - 1
        a.check()
        return
    names = a.resize(new, src, dst)
    a.check()
    renamed = {names.get(u, u) for u in kept}
    assert len(renamed) == len(kept) and all(0 < u < new for u in renamed)
