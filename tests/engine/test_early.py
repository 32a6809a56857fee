"""Serving begins before the bank is full: the same tokens, experts that are asked for come first."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from freetoken.core.errors import FreeTokenError, WeightsError
from freetoken.core.options import Options
from freetoken.core.units import MIB
from freetoken.engine.build import build
from freetoken.weights.files import Files
from tests.experts.device_build import KernelCpu

from .served import Served, alone, text_ids
from .test_sim import SIM

CPU = {"device": "cpu", "max_model_len": 512}


class SlowFiles(Files):
    """A disk that takes its time; `breaks_after` reads it fails."""

    def __init__(self, seconds: float, breaks_after: int = 1 << 30) -> None:
        super().__init__()
        self._seconds, self._left = seconds, breaks_after

    def read_into(self, path: Path, offset: int, out: Tensor, least: int | None = None) -> None:
        time.sleep(self._seconds)
        self._left -= 1
        if self._left < 0:
            raise WeightsError(f"{path.name} can't be read any more.", code="truncated_shard")
        super().read_into(path, offset, out, least)


def answer(served: Served) -> tuple[list[tuple[int, float]], int]:
    """The trace of one request, and how many percent of the experts were there at its first token."""
    percent = -1
    served.submit("a", text_ids(served.built, 1, 5), 4)

    def note(step: int) -> None:
        nonlocal percent
        if percent < 0 and served.outputs.get("a"):
            percent = served.built.percent

    served.run(note)
    return served.trace("a"), percent


@pytest.mark.parametrize("backend", ["cpu", "fused"])
def test_the_first_token_comes_before_the_last_expert_and_is_the_same(backend: str) -> None:
    wishes = {**CPU, "moe_backend": backend}
    served = Served(build(Options(**wishes), early=True, files=SlowFiles(0.008)))
    trace, percent = answer(served)
    assert 0 <= percent < 100
    served.built.filling.wait()
    assert served.built.percent == 100 and trace == alone(1, 5, 4, **wishes)
    served.built.close()


@pytest.mark.parametrize("backend", ["offload", "hybrid", "fused"])
def test_a_device_with_memory_of_its_own_waits_for_what_it_copies(backend: str) -> None:
    wishes = {**SIM, "moe_backend": backend}
    served = Served(build(Options(**wishes), early=True, files=SlowFiles(0.001)))
    assert answer(served)[0] == alone(1, 5, 4, **wishes)
    served.built.close()


def test_a_disk_that_fails_while_serving_fails_the_request_and_the_status() -> None:
    built = build(Options(**CPU), early=True, files=SlowFiles(0.001, breaks_after=200))
    served = Served(built)
    served.submit("a", text_ids(built, 1, 40), 8)
    with pytest.raises(FreeTokenError, match="can't be read any more"):
        served.run()
    assert built.error is not None and built.error.code == "truncated_shard"
    built.close()


def test_a_disk_that_fails_while_loading_is_the_loads_error() -> None:
    with pytest.raises(WeightsError, match="can't be read any more"):
        build(Options(**CPU), files=SlowFiles(0.0, breaks_after=40))


def test_closing_ends_a_load_under_way() -> None:
    built = build(Options(**CPU), early=True, files=SlowFiles(0.01))
    began = time.perf_counter()
    built.close()
    assert time.perf_counter() - began < 10.0 and built.percent < 100


@pytest.mark.parametrize("wishes", [CPU, {**SIM, "moe_backend": "offload"}], ids=["cpu", "sim"])
def test_what_the_start_took_is_told_by_part(wishes: dict[str, Any]) -> None:
    built = build(Options(**wishes), files=SlowFiles(0.001))
    told = built.snapshot()["start_s"]
    assert {"headers", "checks", "device", "plan", "bank", "dense", "experts", "backend"} <= told.keys()
    assert all(seconds >= 0 for seconds in told.values())
    # The bank was full when `experts` had been waited for, and the slow files are what it took.
    assert told["fill"] > 0.01 and told["pin"] >= 0
    built.close()


class LateDense(Files):
    """Dense weights that are read when all experts have been, on a device that needs all of them first."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_under_us = False

    def read_into(self, path: Path, offset: int, out: Tensor, least: int | None = None) -> None:
        if not threading.current_thread().name.startswith(LOADERS):
            end = time.monotonic() + 60
            while loaders() and time.monotonic() < end:
                time.sleep(0.01)
            self.closed_under_us |= not self._open
        super().read_into(path, offset, out, least)


LOADERS = "freetoken-load"


def loaders() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(LOADERS)]


def test_experts_that_come_first_close_no_file_under_the_dense_weights() -> None:
    files = LateDense()
    built = build(Options(max_model_len=512), device=KernelCpu(96 * MIB), files=files)
    assert not files.closed_under_us, "a file that others read was closed"
    assert built.percent == 100 and not files._open, "who reads last closes"
    built.close()
