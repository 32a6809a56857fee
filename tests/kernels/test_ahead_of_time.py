"""Every Triton kernel, compiled for cards that are not here: it fits their shared memory, spills little,
uses no instruction they lack. By default each specimen meets one architecture in turn; all of them as soak.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import freetoken.kernels

pytest.importorskip("triton")
from .ahead import CARDS, compile_for

PACKAGE = "freetoken.kernels"
SPILL_BYTES = 64
CONSUMER_BYTES = 99 << 10


def makers() -> list[str]:
    root = Path(freetoken.kernels.__file__).parent
    return sorted(f"{PACKAGE}.{path.parent.name}.triton" for path in root.glob("*/triton.py"))


def check(maker, specimen, card) -> int:
    """maker.SPILLS names kernels that may spill more, and says why."""
    allowed = vars(maker).get("SPILLS", {})
    launches = specimen(card)
    for launch in launches:
        made = compile_for(launch, card)
        what = f"{launch.kernel.__name__} {dict(launch.consts)} on sm_{card.arch}"
        assert made.shared <= card.shared_bytes, f"{what}: {made.shared} bytes of shared memory"
        most = allowed.get(launch.kernel.__name__, SPILL_BYTES)
        assert made.spilled <= most, f"{what}: {made.spilled} bytes spilled"
        assert card.arch >= 89 or ".e4m3" not in made.ptx, f"{what}: an instruction of sm_89"
    return len(launches)


def test_cards_of_consumers_have_no_more_than_their_shared_memory() -> None:
    assert all(card.shared_bytes == CONSUMER_BYTES for card in CARDS if card.arch in (86, 89, 120))


@pytest.mark.parametrize("maker", makers())
def test_each_specimen_compiles_for_an_architecture(maker: str) -> None:
    module = importlib.import_module(maker)
    specimens = list(module.specimens(torch.bfloat16))
    assert sum(check(module, one, CARDS[(i + len(maker)) % len(CARDS)]) for i, one in enumerate(specimens))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("card", CARDS, ids=lambda c: f"sm_{c.arch}")
@pytest.mark.parametrize("maker", makers())
def test_all_specimens_compile_for_all_architectures(maker: str, card, dtype: torch.dtype) -> None:
    module = importlib.import_module(maker)
    for specimen in module.specimens(dtype):
        check(module, specimen, card)
