"""A container's limit counts wherever in the tree of groups it stands, in both versions of groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from freetoken.core.host_memory import host_memory

MIB = 1 << 20
NAMES = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def group(folder: Path, version: int, limit: str, used: int, droppable: int = 0) -> None:
    _, limit_name, used_name, stat_name = NAMES[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{stat_name} {droppable}\n")


def own(tmp_path: Path, version: int, path: str) -> Path:
    file = tmp_path / "own"
    file.write_text(f"5:cpu,cpuacct:/else\n{'9:memory' if version == 1 else '0:'}:{path}\n")
    return file


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize("limited", ["a/b", "a", ""])
def test_the_limit_of_any_group_above_counts(version: int, limited: str, tmp_path: Path) -> None:
    base = tmp_path / "groups" / NAMES[version][0]
    for path in ("a/b", "a", ""):
        group(base / path, version, str(300 * MIB) if path == limited else str(1 << 62), 100 * MIB, 20 * MIB)
    found = host_memory(own(tmp_path, version, "/a/b"), tmp_path / "groups")
    assert (found.total_bytes, found.free_bytes) == (300 * MIB, 220 * MIB)
    assert found.limited_by == "container limit"


@pytest.mark.parametrize("version", NAMES)
def test_a_group_that_is_not_visible_here_leaves_the_root(version: int, tmp_path: Path) -> None:
    group(tmp_path / "groups" / NAMES[version][0], version, str(50 * MIB), 60 * MIB)
    found = host_memory(own(tmp_path, version, "/from/outside"), tmp_path / "groups")
    assert (found.total_bytes, found.free_bytes) == (50 * MIB, 0)


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    group(tmp_path / "groups", 2, "max", 5)
    for file in (tmp_path / "none", own(tmp_path, 2, "/")):
        found = host_memory(file, tmp_path / "groups")
        assert (found.total_bytes, found.limited_by) == (psutil.virtual_memory().total, "RAM")


@pytest.mark.parametrize(("limit", "used", "left"), [(500 * MIB, 200 * MIB, 300 * MIB), (100, 200, 0)])
def test_a_limit_of_the_process_counts_too(limit: int, used: int, left: int, tmp_path: Path) -> None:
    found = host_memory(tmp_path / "none", tmp_path, [(1 << 60, 1 << 50), (limit, used)])
    assert (found.free_bytes, found.limited_by) == (left, "process limit")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_ulimit_is_seen_by_the_process_it_binds() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20));"
        "from freetoken.core.host_memory import host_memory; m = host_memory();"
        "print(m.free_bytes, m.limited_by)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    free, limited_by = out.stdout.strip().split(" ", 1)
    assert limited_by == "process limit" and 200 << 20 < int(free) < 400 << 20
