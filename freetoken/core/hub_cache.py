"""Models that the hub's tools have downloaded to this machine: found, measured and removed, never fetched.

Owns the layout of that shared folder: `models--OWNER--NAME/` holds `refs/<branch>` (a commit),
`snapshots/<commit>/` (links) and `blobs/`. Knows no network. A name is looked up for its branch `main`.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from freetoken.core import env

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_PREFIX, _BETWEEN = "models--", "--"
_PARTIAL = ".incomplete"


@dataclass(frozen=True)
class Cached:
    """One downloaded model. `path` is its snapshot; `partial` while files of it are on their way."""

    name: str
    path: Path
    num_bytes: int
    used_s: float
    partial: bool


def is_name(text: str) -> bool:
    """True for a name like `owner/model`."""
    return bool(_NAME.match(text)) and ".." not in text


def folder(name: str) -> Path:
    """Where a model's files lie or would lie."""
    return env.hub_cache() / (_PREFIX + name.replace("/", _BETWEEN))


def snapshot(name: str) -> Path | None:
    """The folder of a downloaded model's files, None if there is none."""
    return _snapshot(folder(name)) if is_name(name) else None


def models() -> list[Cached]:
    """All downloaded models by name."""
    found = []
    root = env.hub_cache()
    folders = sorted(root.glob(_PREFIX + "*")) if root.is_dir() else []
    for one in folders:
        name = one.name.removeprefix(_PREFIX).replace(_BETWEEN, "/", 1)
        path = _snapshot(one)
        if path is None or not is_name(name):
            continue
        blobs = [file.stat() for file in one.glob("blobs/*") if file.is_file()]
        if not blobs:  # a system without links keeps the files themselves
            blobs = [file.stat() for file in path.rglob("*") if file.is_file()]
        partial = any(one.glob(f"blobs/*{_PARTIAL}"))
        used = max((stat.st_atime for stat in blobs), default=0.0)
        found.append(Cached(name, path, sum(stat.st_size for stat in blobs), used, partial))
    return found


def remove(name: str) -> None:
    """Delete a downloaded model, all its revisions."""
    shutil.rmtree(folder(name))


def _snapshot(one: Path) -> Path | None:
    """The snapshot that `main` names, else the newest."""
    try:
        commit = (one / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        commit = ""
    if commit and (one / "snapshots" / commit).is_dir():
        return one / "snapshots" / commit
    found = [path for path in one.glob("snapshots/*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
