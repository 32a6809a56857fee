"""CPUs for workers, from trees like the kernel's: threads, kinds of cores, small masks, several nodes."""

from __future__ import annotations

from pathlib import Path

from freetoken.native.topology import allowed_cpus, default_threads, nodes, worker_cpus


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
