"""The zip of `ft doctor --bundle`: checks, versions and options, with the user's name taken out.

Never opens a log, a history or a trace, so that no prompt can get in.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from freetoken import __version__
from freetoken.cli._checks import Check
from freetoken.core import config_file, env
from freetoken.core.errors import ConfigError, FreeTokenError

_README = """What is in this file, written by `ft doctor --bundle`:

checks.json     the rows that ft doctor prints
versions.json   FreeToken, Python, system, installed packages with their versions
options.json    options from config.toml and FREETOKEN_* variables; keys and model paths are left out

No prompts, no answers, no logs. Your home folder is written as ~.
"""
_LEFT_OUT = ("api_key", "api_key_file", "model", "log_file", "record_routing")


def write(path: Path, checks: Sequence[Check]) -> None:
    """Write the bundle; ConfigError if the file cannot be made."""
    parts = {
        "README.txt": _README,
        "checks.json": _json([asdict(c) for c in checks]),
        "versions.json": _json(_versions()),
        "options.json": _json(_options()),
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, text in parts.items():
                bundle.writestr(name, _anonymous(text))
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be written: {e.strerror}.",
            code="unwritable_file",
            hint="Name a file in a folder that you may write to.",
        ) from e


def _json(body: object) -> str:
    return json.dumps(body, indent=1, ensure_ascii=False)


def _versions() -> dict[str, object]:
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "freetoken": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "packages": dict(sorted((n, v) for n, v in packages.items() if n)),
    }


def _options() -> dict[str, object]:
    out: dict[str, object] = {}
    for source, read in (("config.toml", config_file.read), ("environment", env.option_values)):
        try:
            values = read()
        except FreeTokenError as e:
            out[source] = f"error [{e.code}]"
            continue
        out[source] = {n: "(left out)" if n in _LEFT_OUT else v for n, v in values.items()}
    return out


def _anonymous(text: str) -> str:
    home = str(Path.home())
    if len(home) < 3:
        return text
    return text.replace(json.dumps(home)[1:-1], "~").replace(home, "~")
