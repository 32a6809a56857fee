"""The library under the address, undefined-behaviour and thread sanitisers (minutes: `-m soak`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, kind: str) -> Path:
    """The library and the program that drives it, both instrumented."""
    flags = f"-fsanitize={kind} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    cached = {"CXX": "ccache g++"} if shutil.which("ccache") else {}
    env = {**cached, **os.environ, "FT_CXXFLAGS": flags}
    made = folder / "library"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(made)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=1200)
    library = next(made.rglob("libfreetoken.so")).rename(folder / "libfreetoken.so")
    program, source = folder / "stress", ROOT / "tests" / "native" / "stress.cpp"
    link = ["g++", "-std=c++20", *flags.split(), str(source), str(library), "-pthread", "-o", str(program)]
    subprocess.run([*link, "-Wl,-rpath,$ORIGIN"], check=True, timeout=300)
    return program


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_nothing_is_read_or_raced_that_should_not_be(tmp_path: Path, kind: str) -> None:
    program = build(tmp_path, kind)

    def run(part: str) -> str:
        done = subprocess.run([str(program), part], capture_output=True, text=True, timeout=900)
        good = done.returncode == 0 and "all good" in done.stdout
        return "" if good else f"{part}: {done.stdout[-2000:]}{done.stderr[-4000:]}"

    parts = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        assert not "".join(beside.map(run, parts))
