"""An axis is a folder and a choice is a file: this finds the files and loads one by name.

Only composition roots (`engine/build`, the CLI's dispatcher, tests) may call `load`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from freetoken.core.errors import ConfigError, nearest


def names(package: str) -> list[str]:
    """List the choices of an axis, sorted. Files starting with an underscore are not choices."""
    module = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    """Import `package.name`; an unknown name is an error that lists what exists."""
    known = names(package)
    if name not in known:
        axis = package.rsplit(".", 1)[-1]
        raise ConfigError(
            f"Unknown choice {name!r} for {axis}; there are: {', '.join(known)}.",
            code="unknown_choice",
            hint=nearest(name, known),
        )
    return importlib.import_module(f"{package}.{name}")
