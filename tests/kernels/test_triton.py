"""The Triton makers: interpreted here, compiled where there is a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CHECKS = sorted(Path(__file__).parent.glob("triton_*checks.py"))


def run_checks(*options: str, **environment: str) -> None:
    without = ["-p", "no:cacheprovider", "-p", "no:schemathesis"]  # which takes a second to be imported
    command = [sys.executable, "-m", "pytest", "-q", "-x", *without, *options]
    environment = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_the_interpreter_agrees_with_the_references(checks: Path) -> None:
    run_checks(str(checks), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checks", ["step", "expert"])
def test_the_interpreter_agrees_with_the_references_in_every_format(checks: str) -> None:
    path = Path(__file__).parent / f"triton_{checks}_checks.py"
    run_checks(str(path), "-m", "soak", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_the_card_agrees_with_the_references(checks: Path) -> None:
    run_checks(str(checks), "-m", "soak or not soak", TRITON_INTERPRET="0")
