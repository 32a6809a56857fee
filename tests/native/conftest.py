"""Native tests need the library; where there is a compiler there is one."""

from __future__ import annotations

import shutil

import pytest

from freetoken.native.library import library


@pytest.fixture(scope="package", autouse=True)
def _threads():
    if library() is None:
        if shutil.which("g++") or shutil.which("clang++"):
            pytest.fail("a compiler is here but no native library: run `pip install -e .` again")
        pytest.skip("no native library: this machine has no C++ compiler")
    library().start(2)
