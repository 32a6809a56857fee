"""The library under the address, undefined-behaviour and thread sanitisers (minutes: `-m soak`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
def test_nothing_is_read_or_raced_that_should_not_be(tmp_path: Path, kind: str) -> None:
    flags = f"-fsanitize={kind} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    env = {**os.environ, "FT_CXXFLAGS": flags}
    subprocess.run([sys.executable, *build], cwd=ROOT, env=env, check=True, timeout=1200)
    library = next(tmp_path.rglob("libfreetoken.so"))
    program, source = tmp_path / "stress", ROOT / "tests" / "native" / "stress.cpp"
    link = ["g++", "-std=c++20", *flags.split(), str(source), str(library), "-pthread", "-o", str(program)]
    subprocess.run([*link, f"-Wl,-rpath,{library.parent}"], check=True, timeout=300)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "all good" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
