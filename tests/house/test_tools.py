"""The tools that keep the house clean, run as tests where they are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from house_source import MAY_NAME_TORCH, ROOT, TORCH_FREE_FILES, TORCH_FREE_ROOMS, sources

FOLDERS = ("freetoken", "tests", "scripts", "benchmarks", "demo")


def run(*command: str) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--quiet", *FOLDERS)


def test_ruff_would_format_nothing() -> None:
    run("ruff", "format", "--check", "--quiet", *FOLDERS)


def test_torch_free_rooms_are_fully_typed() -> None:
    files = [
        str(s.path.relative_to(ROOT))
        for s in sources()
        if (s.room in TORCH_FREE_ROOMS or s.name in TORCH_FREE_FILES) and s.name not in MAY_NAME_TORCH
    ]
    run("mypy", "--strict", "--no-error-summary", *files)
