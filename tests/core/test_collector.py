"""The collector rests inside, and goes on afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from freetoken.core import collector


def test_it_goes_on_after_an_error_and_after_another_pause() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), collector.paused():
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
