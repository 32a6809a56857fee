"""Every Triton kernel, compiled for cards that are not here: it fits their shared memory, spills little,
uses no instruction they lack. By default each specimen meets one architecture in turn; all of them as soak.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import freetoken.kernels
from freetoken.core import choices
from freetoken.core.model_config import Activation
from freetoken.experts.gpu_support import device_record
from freetoken.experts.record import layout
from freetoken.kernels._triton import Card, Launch
from freetoken.kernels.expert_step import triton as step
from freetoken.quant._mixed import MixedFormat

pytest.importorskip("triton")
from .ahead import CARDS, Compiled, compile_for

PACKAGE = "freetoken.kernels"
SPILL_BYTES = 64
PLAYED_BYTES = 16
"""What a played link may cost beside, which is for measuring only: 80 on sm_120."""
CONSUMER_BYTES = 99 << 10
_EVERY = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
FORMATS = {fmt.name: fmt for fmt in _EVERY if fmt.device_code(max(fmt.block, 32), 512) and fmt.name != "bf16"}
FORMATS["q4_k+q6_k"] = MixedFormat([FORMATS["q4_k"], FORMATS["q4_k"], FORMATS["q6_k"]])


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
        most = allowed.get(launch.kernel.__name__, SPILL_BYTES) + (PLAYED_BYTES if plays(launch) else 0)
        assert made.spilled <= most, f"{what}: {made.spilled} bytes spilled"
        assert card.arch >= 89 or ".e4m3" not in made.ptx, f"{what}: an instruction of sm_89"
    return len(launches)


def plays(launch: Launch) -> bool:
    """Whether a slower link than there is is played."""
    names = launch.kernel.arg_names
    return "link" in names and launch.args[names.index("link")] is not None


def test_cards_of_consumers_have_no_more_than_their_shared_memory() -> None:
    assert all(card.shared_bytes == CONSUMER_BYTES for card in CARDS if card.arch in (86, 89, 120))


@pytest.mark.parametrize("maker", makers())
def test_each_specimen_compiles_for_an_architecture(maker: str) -> None:
    module = importlib.import_module(maker)
    specimens = list(module.specimens(torch.bfloat16))
    assert sum(check(module, one, CARDS[(i + len(maker)) % len(CARDS)]) for i, one in enumerate(specimens))


def coded(name: str) -> tuple:
    """A format's record at the geometry of a model that comes in it: (record, experts, activation)."""
    fmt = FORMATS[name]
    hidden, size, experts = (2880, 2880, 32) if name == "mxfp4" else (2048, 768, 128)
    one = layout(hidden, size, fmt, biased=name == "mxfp4")
    act = Activation("silu", 1.702, 7.0, 1.0) if name == "mxfp4" else Activation()
    return device_record(one, fmt), experts, act


def check_coded(name: str, rows: int, dtype: torch.dtype, card: Card) -> Compiled:
    record, experts, act = coded(name)
    launch = step.coded_specimen(record, experts, rows, dtype, act, card)
    assert launch.kernel.__name__ in ("coded_vector_rows", "coded_few_rows")
    made = compile_for(launch, card)
    what = f"{launch.kernel.__name__} of {name} on sm_{card.arch}"
    assert made.shared <= card.shared_bytes, f"{what}: {made.shared} bytes of shared memory"
    assert made.spilled <= SPILL_BYTES, f"{what}: {made.spilled} bytes spilled"
    assert ".e4m3" not in made.ptx and ".ftz" not in made.ptx, (
        f"{what}: small floats are bits, whole ones kept"
    )
    return made


@pytest.mark.parametrize(("name", "arch"), [("mxfp4", 86), ("q6_k", 120)])
def test_coded_experts_compile_for_cards_of_consumers(name: str, arch: int) -> None:
    check_coded(name, 1, torch.bfloat16, next(card for card in CARDS if card.arch == arch))


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("q4_k", marks=pytest.mark.soak)])
def test_a_coded_weight_of_one_row_takes_few_instructions(name: str) -> None:
    """16 rows of gate and of up by 512 columns are a loop's body; with 10 to 12 they bound the speed."""
    weights_a_thread = 2 * 16 * 512 / 128
    most = check_coded(name, 1, torch.bfloat16, CARDS[1]).longest_stretch()
    assert 3 * weights_a_thread < most < 6.5 * weights_a_thread


@pytest.mark.parametrize("rows", [1, 64])
def test_coded_experts_come_over_a_played_link(rows: int) -> None:
    """And without one nothing of it is compiled."""
    record, experts, act = coded("nvfp4")
    launch = step.coded_specimen(record, experts, rows, torch.bfloat16, act, CARDS[3])
    at = launch.kernel.arg_names.index("link")
    link = torch.empty(4, dtype=torch.int64, device="meta")
    played = replace(launch, args=(*launch.args[:at], link, *launch.args[at + 1 :]))
    assert not plays(launch) and plays(played)
    assert "%globaltimer" not in compile_for(launch, CARDS[3]).ptx
    made = compile_for(played, CARDS[3])
    assert "%globaltimer" in made.ptx and made.spilled <= SPILL_BYTES


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("card", CARDS, ids=lambda c: f"sm_{c.arch}")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_compiles_for_all_architectures(name: str, card: Card) -> None:
    for rows, dtype in ((1, torch.bfloat16), (1, torch.float16), (64, torch.bfloat16)):
        check_coded(name, rows, dtype, card)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("card", CARDS, ids=lambda c: f"sm_{c.arch}")
@pytest.mark.parametrize("maker", makers())
def test_all_specimens_compile_for_all_architectures(maker: str, card, dtype: torch.dtype) -> None:
    module = importlib.import_module(maker)
    for specimen in module.specimens(dtype):
        check(module, specimen, card)
