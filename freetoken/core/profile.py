"""What was measured on this machine, kept between runs: bandwidths and fixed costs, by machine.

Owns the file `profiles/bandwidth.json` under FREETOKEN_HOME, its version and the rule that a profile of
another machine is ignored and said so. Doesn't measure. Rates are bytes per second, times seconds.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freetoken.core import env
from freetoken.core.log import logger

_log = logger("profile")
VERSION = 2


@dataclass(frozen=True)
class Profile:
    """machine     key of the machine it was measured on
    host_bw       bytes/s   what all CPU threads read from host memory together (B_H)
    threads       threads that this took
    cpu_fixed_s   s         fixed cost of one CPU branch, by weight format (a_c)
    expert_bw     bytes/s   expert weights computed by all threads, by weight format, one row
    link_bw       bytes/s   to the GPU, alone; 0 = there was none
    link_bw_beside_host, host_bw_beside_link   bytes/s   both at once
    """

    machine: str
    host_bw: float
    threads: int
    date: str = ""
    cpu_fixed_s: Mapping[str, float] = field(default_factory=dict)
    expert_bw: Mapping[str, float] = field(default_factory=dict)
    link_bw: float = 0.0
    link_bw_beside_host: float = 0.0
    host_bw_beside_link: float = 0.0


def machine_key() -> str:
    """A short name that is the same for this machine from run to run, and hardly ever another's."""
    facts = [platform.node(), platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("model name", "cpu cores", "siblings"))})
        facts += [line for line in Path("/proc/meminfo").read_text().splitlines()[:1]]
    except OSError:
        pass
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def path() -> Path:
    return env.home() / "profiles" / "bandwidth.json"


def save(profile: Profile) -> Path:
    """Write the profile; returns where it lies."""
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    body = {"version": VERSION, **asdict(profile)}
    where.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    return where


def load() -> Profile | None:
    """This machine's profile; None if there is none, or one that is damaged, old or another machine's."""
    try:
        raw: dict[str, Any] = json.loads(path().read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("the bandwidth profile %s can't be read (%s); run: ft bench bw", path(), error)
        return None
    if not isinstance(raw, dict) or raw.pop("version", None) != VERSION:
        _log.warning("the bandwidth profile %s is of another version; run: ft bench bw", path())
        return None
    if raw.get("machine") != machine_key():
        _log.warning("the bandwidth profile %s is another machine's; run: ft bench bw", path())
        return None
    try:
        return Profile(**raw)
    except TypeError:
        _log.warning("the bandwidth profile %s is damaged; run: ft bench bw", path())
        return None
