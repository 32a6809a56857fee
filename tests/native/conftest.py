"""Native tests need the library; where there is a compiler there is one."""

from __future__ import annotations

import shutil

import pytest

from freetoken.native.library import library
from tests.native.elsewhere import aarch64


@pytest.fixture(scope="package", autouse=True)
def _threads():
    if library() is None:
        if shutil.which("g++") or shutil.which("clang++"):
            pytest.fail("a compiler is here but no native library: run `pip install -e .` again")
        pytest.skip("no native library: this machine has no C++ compiler")
    library().start(2)


@pytest.fixture(scope="session")
def arm(tmp_path_factory):
    """The library as an aarch64 machine has it."""
    return aarch64(tmp_path_factory.mktemp("arm"), "elsewhere")
