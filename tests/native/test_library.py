"""The library is found, forced to a tier, turned off; its structs are what the header says."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import freetoken
from freetoken.native.library import Layer, library
from tests.native.build import lib

HEADER = Path(freetoken.__file__).parent / "native" / "api.h"
SHOW = "from freetoken.native.library import library; found = library(); print(found and found.tier)"


def shown(monkeypatch, tier: str) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("FREETOKEN_NATIVE_TIER", tier)
    return subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("tier", library().tiers if library() else ())
def test_the_environment_forces_a_tier(monkeypatch, tier):
    assert shown(monkeypatch, tier).stdout.strip() == tier


def test_off_means_torch_without_a_warning(monkeypatch):
    done = shown(monkeypatch, "off")
    assert done.stdout.strip() == "None" and not done.stderr


def test_an_unknown_tier_is_an_error_that_names_the_known_ones(monkeypatch):
    done = shown(monkeypatch, "avx3")
    assert done.returncode and "scalar" in done.stderr and "FREETOKEN_NATIVE_TIER" in done.stderr


def test_a_missing_library_is_one_warning(monkeypatch, tmp_path, caplog):
    from freetoken.native import library as module

    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    module.library.cache_clear()
    try:
        with caplog.at_level("WARNING", "freetoken.native"):
            assert module.library() is None and module.library() is None
    finally:
        monkeypatch.undo()
        module.library.cache_clear()
    assert [r.getMessage() for r in caplog.records if "not built" in r.getMessage()] == [
        caplog.records[-1].getMessage()
    ]


def test_the_last_tier_is_the_automatic_choice_and_any_machine_has_scalar(monkeypatch):
    assert "scalar" in lib().tiers and shown(monkeypatch, "").stdout.strip() == lib().tiers[-1]


def test_the_library_needs_neither_torch_nor_cuda():
    if shutil.which("ldd") is None:
        pytest.skip("no ldd")
    from freetoken.native.library import file_name

    done = subprocess.run(["ldd", str(HEADER.parent / file_name())], capture_output=True, text=True)
    assert "torch" not in done.stdout and "cuda" not in done.stdout and "python" not in done.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_the_layer_struct_has_the_headers_offsets(tmp_path):
    lines = [f'printf("%zu\\n", offsetof(ft_layer, {name}));' for name, _ in Layer._fields_]
    source = (
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{{"".join(lines)}'
    )
    source += 'printf("%zu\\n", sizeof(ft_layer));}'
    program = tmp_path / "offsets"
    command = ["gcc", "-x", "c", "-Wall", "-Werror", "-", "-o", str(program)]
    subprocess.run(command, input=source, text=True, check=True)
    found = [int(v) for v in subprocess.run([program], capture_output=True, text=True).stdout.split()]
    assert found == [*(getattr(Layer, name).offset for name, _ in Layer._fields_), ctypes.sizeof(Layer)]
