"""The package's source as syntax trees, for the tests of the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "freetoken"

# Imports point from a room to rooms of a higher number only; equal numbers are siblings.
RANK = {
    "cli": 0,
    "__main__": -1,
    "api": 1,
    "llm": 2,
    "bench": 3,
    "engine": 4,
    "models": 5,
    "quant": 6,
    "experts": 6,
    "attention": 6,
    "layers": 6,
    "kernels": 7,
    "weights": 7,
    "cache": 7,
    "chat": 7,
    "devices": 7,
    "native": 8,
    "core": 9,
    "__init__": 10,
    "data": 10,
}
TORCH_FREE_ROOMS = ("cli", "api", "chat", "cache", "core")
TORCH_FREE_FILES = tuple(f"engine/{name}.py" for name in ("scheduler", "budget", "plan", "stats"))
MAY_NAME_TORCH = ("core/batch.py", "core/interfaces.py", "core/weights.py")


@dataclass(frozen=True)
class Source:
    """One Python file of the package."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def name(self) -> str:
        """Path within the package, like `core/env.py`."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def room(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_kernel(self) -> bool:
        return self.room == "kernels"

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def walk(self) -> Iterator[ast.AST]:
        return iter(self.nodes)

    def at(self, node: ast.AST) -> str:
        return f"freetoken/{self.name}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """(node, absolute dotted name) of every import, wherever it stands."""
        for node in self.walk():
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node, f"{base}.{alias.name}") for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        if self.path.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)


@cache
def sources() -> tuple[Source, ...]:
    """All of the package's files, read and parsed once for all tests."""
    return tuple(Source(p) for p in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in p.parts)


@cache
def modules() -> dict[str, Source]:
    return {s.module: s for s in sources()}


def room_of(dotted: str) -> str | None:
    """Room of `freetoken.x.y`; None for other packages. `freetoken.__version__` is the root's."""
    parts = dotted.split(".")
    if parts[0] != "freetoken":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


def report(breaches: list[str]) -> str:
    return "\n  ".join(["", *breaches])
