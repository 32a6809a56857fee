"""An axis is a folder and a choice is a file: this finds the files and loads one by name.

Only who composes calls `load`: `engine/build`, the CLI, benches, a room over its own axis, tests.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

from freetoken.core.errors import ConfigError, nearest


def names(package: str) -> list[str]:
    """List the choices of an axis, sorted. Files starting with an underscore are not choices."""
    module = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_"))


def constant(package: str, name: str, key: str) -> str:
    """Read the string constant `key` of a choice's file without importing it; empty if absent."""
    spec = importlib.util.find_spec(f"{package}.{name}")
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == key for t in targets):
            value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return value if isinstance(value, str) else ""
    return ""


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
