"""CPUs for workers, from trees like the kernel's: threads, kinds of cores, small masks, several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freetoken.native.library import library
from freetoken.native.topology import (
    UNLIMITED,
    allowed_cpus,
    default_threads,
    memory_nodes,
    node_of,
    quota,
    worker_cpus,
)


def tree(root: Path, siblings: list[str], atoms: str = "") -> Path:
    cpu = root / "devices" / "system" / "cpu"
    for number, text in enumerate(siblings):
        folder = cpu / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    if atoms:
        (root / "devices" / "cpu_atom").mkdir()
        (root / "devices" / "cpu_atom" / "cpus").write_text(atoms)
    return cpu


def test_one_cpu_of_each_core(tmp_path):
    cpu = tree(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2)
    assert worker_cpus(cpu, list(range(8))) == [0, 1, 2, 3]
    assert worker_cpus(cpu, [4, 5, 1]) == [1, 4]
    assert worker_cpus(cpu, [6]) == [6]


def test_performance_cores_come_first(tmp_path):
    cpu = tree(tmp_path, ["0-1", "0-1", "2", "3"], "0-1")
    assert worker_cpus(cpu, [0, 1, 2, 3]) == [2, 3, 0]


def test_a_machine_that_says_nothing_or_nonsense(tmp_path):
    assert worker_cpus(tmp_path, [0, 3]) == [0, 3]
    assert worker_cpus(tree(tmp_path, ["zero"]), [0]) == [0]
    assert worker_cpus(tmp_path, []) == []


def test_few_cores_all_work_and_many_leave_room():
    assert [default_threads(n) for n in (1, 2, 4, 6, 16)] == [1, 2, 4, 5, 15]
    assert default_threads() >= 1 and set(worker_cpus()) <= set(allowed_cpus())


def node_tree(root: Path, cpus: dict[int, str], with_memory: str) -> Path:
    for number, text in cpus.items():
        (root / f"node{number}").mkdir(parents=True)
        (root / f"node{number}" / "cpulist").write_text(text)
    (root / "has_memory").write_text(with_memory)
    return root


def test_memory_nodes_with_gaps(tmp_path):
    tree = node_tree(tmp_path / "three", {0: "0-3", 2: "4-7", 10: ""}, "0,2,10")
    assert node_of(tree) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 2, 5: 2, 6: 2, 7: 2}
    assert memory_nodes([0, 5, 6], tree) == [0, 2]
    assert memory_nodes([1, 2], tree) == [0]
    bare = node_tree(tmp_path / "bare", {0: "0-1", 1: "2-3"}, "1")
    assert memory_nodes([0, 2], bare) == [1], "a node without memory holds no weights"
    assert node_of(tmp_path / "none") == {} and memory_nodes([0], tmp_path / "none") == []


def test_workers_take_memory_nodes_by_turns(tmp_path):
    cpu = tree(tmp_path, [str(n) for n in range(8)])
    nodes = node_tree(tmp_path / "nodes", {0: "0-3", 1: "4-7"}, "0-1")
    assert worker_cpus(cpu, list(range(8)), nodes) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert worker_cpus(cpu, [0, 1, 2, 6], nodes) == [0, 6, 1, 2]


def test_performance_cores_of_every_node_come_before_the_others(tmp_path):
    cpu = tree(tmp_path, [str(n) for n in range(6)], "1,4-5")
    nodes = node_tree(tmp_path / "nodes", {0: "0-2", 1: "3-5"}, "0-1")
    assert worker_cpus(cpu, list(range(6)), nodes) == [0, 3, 2, 1, 4, 5]


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists(), reason="the system names no memory node"
)
@pytest.mark.skipif(not memory_nodes(worker_cpus()), reason="the system names no memory node")
def test_the_system_takes_memory_from_the_nodes_that_are_named():
    lib, memory = library(), torch.empty(4 << 20, dtype=torch.uint8)
    mine = memory_nodes(worker_cpus())
    assert lib.spread(memory.data_ptr(), memory.numel()) == (len(mine) > 1)
    assert lib.spread(memory.data_ptr(), memory.numel(), mine[:1]), "by turns from one node"
    assert int(memory.fill_(1).sum()) == memory.numel()
    assert not lib.spread(memory.data_ptr(), memory.numel(), [1 << 20]), "no such node"


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        ({"": "max 100000"}, UNLIMITED),
        ({"": "150000 100000"}, 1),
        ({"a/b": "400000 100000", "a": "250000 100000"}, 2),
        ({"a/b": "max 100000", "a": "800000 100000"}, 8),
        ({"a/b": "5000 100000"}, 1),
        ({"a/b": "nonsense"}, UNLIMITED),
        ({"elsewhere": "100000 100000"}, UNLIMITED),
    ],
)
def test_a_quota_of_any_group_above_limits_the_threads(tmp_path, limits, cpus):
    for path, text in limits.items():
        group(tmp_path / "fs", path, cpu__max=text)
    (tmp_path / "self").write_text("0::/a/b\n")
    assert quota(tmp_path / "fs", tmp_path / "self") == cpus


def test_the_older_kind_of_groups_has_a_tree_for_each_controller(tmp_path):
    fs = tmp_path / "fs"
    group(fs, "cpu,cpuacct/box", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    group(fs, "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(fs, "memory/box", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    (tmp_path / "self").write_text("4:memory:/box\n3:cpu,cpuacct:/box\nbroken\n")
    assert quota(fs, tmp_path / "self") == 3
    assert quota(fs, tmp_path / "nowhere") == UNLIMITED


def test_one_cpu_of_many_and_cpus_that_are_gone(tmp_path):
    cpu = tree(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    assert worker_cpus(cpu, [3]) == [3]
    (cpu / "cpu1" / "topology" / "thread_siblings_list").unlink()  # offline: nothing is said of it
    assert worker_cpus(cpu, [0, 2, 3]) == [0, 3]
