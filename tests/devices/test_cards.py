"""Which card is used, and how the driver's libraries are found: by what is there, not by what imports."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from freetoken.core.errors import ConfigError
from freetoken.devices import _nvml, cuda

OLD, USABLE = ((6, 1), (7, 0), (7, 5)), ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))


@pytest.fixture
def cards(monkeypatch):
    """Call it with (major, minor)s: a machine with such cards, named "Card 7.5" and so on."""

    def there(*capabilities):
        found = [
            SimpleNamespace(major=a, minor=b, name=f"Card {a}.{b}", uuid=f"00{n}")
            for n, (a, b) in enumerate(capabilities)
        ]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])

    return there


@pytest.mark.parametrize("capability", USABLE)
def test_a_card_is_taken_by_its_capability(capability, cards):
    cards(OLD[0], capability)
    assert cuda.find_card("") == 1, "an old one before it is passed over"
    name = "card {}.{}".format(*capability)
    assert [cuda.find_card(wanted) for wanted in ("1", name, "001", "GPU-001")] == [1] * 4


@pytest.mark.parametrize("capability", OLD)
@pytest.mark.parametrize("wanted", ["", "0", "Card"])
def test_an_old_card_is_refused_and_says_what_would_do(capability, wanted, cards):
    cards(capability)
    with pytest.raises(ConfigError) as e:
        cuda.find_card(wanted)
    assert e.value.code == "no_gpu" and "too old" in e.value.hint and "8.0" in e.value.hint


@pytest.mark.parametrize("wanted", ["2", "-1", "4090", "GPU-7"])
def test_a_name_that_no_card_has_lists_those_there_are(wanted, cards):
    cards((8, 6), (9, 0))
    with pytest.raises(ConfigError, match=wanted) as e:
        cuda.find_card(wanted)
    assert "0: Card 8.6" in e.value.hint and "1: Card 9.0" in e.value.hint


@pytest.mark.parametrize("there", _nvml.NAMES)
def test_the_management_library_is_found_by_any_of_its_names(there, monkeypatch):
    """Some systems have the versioned name only."""

    def load(name):
        if name != there:
            raise OSError(name)
        return SimpleNamespace(nvmlInit_v2=lambda: 0)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert _nvml.open_nvml.__wrapped__() is not None


def test_a_management_library_that_is_absent_or_does_not_start_is_none(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 9))
    assert _nvml.open_nvml.__wrapped__() is None
