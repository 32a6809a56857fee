"""Memory that this process may still take: the machine's, or a smaller share that a limit leaves.

Owns reading Linux control groups, both versions, from the process's own group up to the root, and the
process's own limits (ulimit -v, -d): the tightest one counts. Knows no plan. Page cache that can be
dropped counts as free, as it does for the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes, and what limits them: `RAM`, `container limit` or `process limit`."""

    total_bytes: int
    free_bytes: int
    limited_by: str


def host_memory(
    own_groups: Path = _OWN_GROUPS,
    root: Path = _ROOT,
    process_limits: Sequence[tuple[int, int]] = (),
) -> HostMemory:
    """What this process may use. Never raises: what can't be read does not limit."""
    memory = psutil.virtual_memory()
    total, free, limited_by = int(memory.total), int(memory.available), "RAM"
    for limit, used in _limits(own_groups, root):
        if limit < total:
            total, limited_by = limit, "container limit"
        free = min(free, max(limit - used, 0))
    for limit, used in process_limits or _process_limits():
        if limit < total:
            total = limit
        if limit - used < free:
            free, limited_by = max(limit - used, 0), "process limit"
    return HostMemory(total, free, limited_by)


def _process_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process's address space and data, where the system has such limits."""
    if sys.platform != "linux":
        return []
    process = psutil.Process()
    used = process.memory_info()
    pairs = [(psutil.RLIMIT_AS, used.vms), (psutil.RLIMIT_DATA, used.data)]
    limits = [(int(process.rlimit(which)[0]), int(now)) for which, now in pairs]
    return [(limit, now) for limit, now in limits if limit != psutil.RLIM_INFINITY and limit >= 0]


def _limits(own_groups: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every memory group that holds this process."""
    for line in _text(own_groups).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = base / path.strip("/")
        for group in (own, *own.parents):
            limit, used = _text(group / names[0]).strip(), _text(group / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used) - _droppable(group, names[2])
            if group == base:
                break


def _droppable(group: Path, name: str) -> int:
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
