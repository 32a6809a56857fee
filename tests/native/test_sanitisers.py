"""The library under the address, undefined-behaviour and thread sanitisers (minutes: `-m soak`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.elsewhere import program


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_nothing_is_read_or_raced_that_should_not_be(tmp_path: Path, kind: str) -> None:
    flags = f"-fsanitize={kind} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    stress = program(tmp_path, "stress", flags=flags)

    def run(part: str) -> str:
        done = subprocess.run([str(stress), part], capture_output=True, text=True, timeout=900)
        good = done.returncode == 0 and "all good" in done.stdout
        return "" if good else f"{part}: {done.stdout[-2000:]}{done.stderr[-4000:]}"

    parts = subprocess.run([str(stress)], capture_output=True, text=True, check=True).stdout.split()
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        assert not "".join(beside.map(run, parts))
