"""The only place that reads the environment. One line a name.

FREETOKEN_HOME        folder for config.toml, measured profiles and traces (default ~/.freetoken)
FREETOKEN_<OPTION>    any option, in capitals: FREETOKEN_MOE_BACKEND=hybrid
FREETOKEN_NATIVE_TIER scalar, avx2, avx2_vnni, avx512, avx512_bf16, amx, neon, or off (no library)
PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF   how torch takes GPU memory; ours unless set
OMP_WAIT_POLICY       how torch's threads wait; passive unless set, so that they leave the cores to ours
NO_COLOR, TERM=dumb   plain terminal output
HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME   where the hub's own tools keep downloaded models
HF_HUB_OFFLINE        never ask the hub
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from freetoken.core.errors import ConfigError, nearest
from freetoken.core.options import names, parse_value

PREFIX = "FREETOKEN_"
_OTHER = ("HOME", "NATIVE_TIER")


def home() -> Path:
    return Path(os.environ.get("FREETOKEN_HOME") or Path.home() / ".freetoken")


def native_tier() -> str:
    """The instruction-set tier to use, `off` for none, empty for the best one."""
    return os.environ.get("FREETOKEN_NATIVE_TIER", "").strip().lower()


def names_an_allocator() -> bool:
    """Whether the user has said how torch shall take GPU memory."""
    return any(os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))


def let_openmp_sleep() -> None:
    """Have torch's threads sleep between operations unless the user says otherwise; before torch is imported.

    They would spin on the cores where our own workers compute, and on a busy machine a thread that has lost
    its core keeps the others spinning for a scheduler's slice (measured: 242 ms instead of 81).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def no_color() -> bool:
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def hub_cache() -> Path:
    """The folder of downloaded models that all tools of the hub share."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "huggingface" / "hub"


def hub_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "TRUE", "YES", "ON")


def option_values() -> dict[str, Any]:
    """Options given as FREETOKEN_* variables; an unknown name is an error with the nearest one."""
    out: dict[str, Any] = {}
    known = {n.upper(): n for n in names()}
    for key in sorted(os.environ):
        if not key.startswith(PREFIX) or key[len(PREFIX) :] in _OTHER:
            continue
        name = known.get(key[len(PREFIX) :])
        if name is None:
            hint = nearest(key.upper(), [PREFIX + n for n in known])
            raise ConfigError(
                f"Unknown environment variable {key}.",
                code="unknown_option",
                hint=hint or "See the names with: ft config --all",
            )
        out[name] = parse_value(name, os.environ[key], key)
    return out


def names_matching(pattern: re.Pattern[str]) -> list[str]:
    """Names of variables that are set and match, sorted. Values are never looked at."""
    return sorted(name for name in os.environ if pattern.search(name))


def child(removed: Iterable[str], added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child: without `removed`, with `added`."""
    dropped = set(removed)
    return {name: value for name, value in os.environ.items() if name not in dropped} | dict(added)
