"""CPUs for workers, from trees like the kernel's: threads, kinds of cores, small masks, several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.native.topology import UNLIMITED, allowed_cpus, default_threads, nodes, quota, worker_cpus


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


def test_memory_nodes_with_gaps(tmp_path):
    for number, text in ((0, "0-3"), (2, "4-7"), (10, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    assert nodes(tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert nodes(tmp_path / "none") == [allowed_cpus()]


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
