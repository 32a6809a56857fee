"""Which CPUs workers may use: one per physical core, inside this process's affinity mask and its quota.

Reads Linux's /sys and control groups; elsewhere it falls back to counts. Pure integers, no torch. Where
memory has several nodes, workers and weights are spread over all of them alike: a few workers read from every
node, and each finds as much far away as any other. Invariant: every CPU named is one that the process may run
on, and no two of them share a core.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SYS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 20
ROOM_FROM = 6
"""From this many cores on, one is left to the server and the desktop."""


def allowed_cpus() -> list[int]:
    """CPUs of the affinity mask (control groups included), ascending; empty where there is no such thing."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return []


def worker_cpus(sys_cpu: Path = _SYS, allowed: list[int] | None = None, sys_node: Path = _NODES) -> list[int]:
    """One allowed CPU of each physical core; performance cores first where the system tells them apart, those
    of several memory nodes by turns."""
    cpus = allowed_cpus() if allowed is None else allowed
    seen: set[tuple[int, ...]] = set()
    out: list[int] = []
    for cpu in sorted(cpus, key=lambda c: (-_capacity(sys_cpu, c), c)):
        siblings = tuple(_read_list(sys_cpu / f"cpu{cpu}" / "topology" / "thread_siblings_list")) or (cpu,)
        if siblings not in seen:
            seen.add(siblings)
            out.append(cpu)
    turns: dict[tuple[int, int], int] = {}
    order = []
    for cpu in out:
        kind = -_capacity(sys_cpu, cpu)
        at = (kind, node_of(sys_node).get(cpu, 0))
        turns[at] = turns.get(at, 0) + 1
        order.append((kind, turns[at], at[1], cpu))
    return [cpu for *_, cpu in sorted(order)]


def default_threads(cores: int | None = None) -> int:
    """Threads of the CPU branch, the engine's own among them: all of a few cores, all but one of many."""
    if cores is None:
        cores = min(len(worker_cpus()) or os.cpu_count() or 1, quota())
    return cores if cores < ROOM_FROM else cores - 1


def quota(groups: Path = _GROUPS, member: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs' worth of time that control groups allow this process; UNLIMITED if they don't say.

    More threads than that are stopped for the rest of a period, in the middle of a step.
    """
    try:
        lines = member.read_text().splitlines()
    except OSError:
        return UNLIMITED
    least = float(UNLIMITED)
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        for folder in (root / path.strip("/"), *(root / path.strip("/")).parents):
            if folder != root and root not in folder.parents:
                break
            least = min(least, _limit(folder))
    return max(1, int(least))


def _limit(folder: Path) -> float:
    """CPUs that one control group allows: version 2's `cpu.max`, or version 1's two files."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else UNLIMITED
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no such file
        return UNLIMITED


def node_of(sys_node: Path = _NODES) -> dict[int, int]:
    """The memory node of each CPU; empty if the system names none."""
    return {
        cpu: int(folder.name[4:])
        for folder in sys_node.glob("node[0-9]*")
        for cpu in _read_list(folder / "cpulist")
    }


def memory_nodes(cpus: list[int], sys_node: Path = _NODES) -> list[int]:
    """The nodes of these CPUs that have memory, ascending."""
    nodes = node_of(sys_node)
    with_memory = _read_list(sys_node / "has_memory")
    return sorted({nodes[cpu] for cpu in cpus if cpu in nodes and nodes[cpu] in with_memory})


def _capacity(sys_cpu: Path, cpu: int) -> int:
    """What the kernel says a core can do: 1024 is the strongest; equal where it says nothing."""
    try:
        return int((sys_cpu / f"cpu{cpu}" / "cpu_capacity").read_text())
    except (OSError, ValueError):
        pass
    atoms = _read_list(sys_cpu.parent.parent / "cpu_atom" / "cpus")
    return 512 if cpu in atoms else 1024


def _read_list(path: Path) -> list[int]:
    """Parse `0-3,8`; empty if unreadable."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    out: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            out += range(int(first), int(last or first) + 1)
    except ValueError:
        return []
    return out
