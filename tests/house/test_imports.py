"""Imports: their direction, their circles, and what the torch-free rooms may not name."""

from __future__ import annotations

import ast
import subprocess
import sys
import time

from house_source import (
    MAY_NAME_TORCH,
    RANK,
    TORCH_FREE_FILES,
    TORCH_FREE_ROOMS,
    modules,
    report,
    room_of,
    sources,
)

HEAVY = ("torch", "transformers")
POSIX_ONLY = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "posix_ipc")
EXTRA = ("triton", "pynvml", "textual", "uvloop", "httptools")
"""Packages that an installation may be without."""
OPTIONAL = (*EXTRA, "llguidance")


def test_every_room_has_its_place() -> None:
    unknown = sorted({s.room for s in sources()} - set(RANK))
    assert not unknown, f"rooms without a rank in house_source.RANK: {unknown}"


def test_imports_point_rightwards_and_never_to_a_sibling_room() -> None:
    breaches = []
    for source in sources():
        for node, name in source.imports():
            room = room_of(name)
            if room is None or room == source.room:
                continue
            if RANK[room] <= RANK[source.room]:
                breaches.append(f"{source.at(node)} ({source.room}) imports {name}")
    assert not breaches, report(breaches)


def test_no_file_imports_itself_in_a_circle() -> None:
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, source in known.items():
        targets = {_existing(dotted, known) for _, dotted in source.imports()}
        graph[name] = {t for t in targets if t and t != name}
    assert not (circle := _circle(graph)), " -> ".join(circle)


def _existing(dotted: str, known: dict[str, object]) -> str | None:
    """The module that an import of `dotted` reads: itself, or its parent if it names a value."""
    if dotted in known:
        return dotted
    parent = dotted.rpartition(".")[0]
    return parent if parent in known else None


def _circle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_torch_is_not_named_where_it_is_banned() -> None:
    breaches = []
    for source in sources():
        banned = source.room in TORCH_FREE_ROOMS or source.name in TORCH_FREE_FILES
        if not banned or source.name in MAY_NAME_TORCH:
            continue
        breaches += [
            f"{source.at(n)} imports {name}" for n, name in source.imports() if name.split(".")[0] in HEAVY
        ]
    assert not breaches, report(breaches)


def test_no_type_checking_imports() -> None:
    breaches = [
        source.at(node)
        for source in sources()
        for node in source.walk()
        if isinstance(node, (ast.Name, ast.Attribute))
        and (getattr(node, "id", "") == "TYPE_CHECKING" or getattr(node, "attr", "") == "TYPE_CHECKING")
    ]
    assert not breaches, "the type lives on the wrong floor:" + report(breaches)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from freetoken.cli.main import main; rc = main(['--help']);"
        f"bad = [m for m in {HEAVY + ('numpy', 'starlette', 'uvicorn', 'jinja2')!r} if m in sys.modules];"
        "print(bad, file=sys.stderr); sys.exit(rc or bool(bad))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    print(f"ft --help: {(time.monotonic() - started) * 1000:.0f} ms")
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_torch_free_rooms_import_without_torch() -> None:
    """A server listens, and every command says what is wrong with its words, before torch is imported."""
    rooms = ("cli", "api", "llm", "chat", "core")
    wanted = [s.module for s in sources() if s.room in rooms and s.name not in MAY_NAME_TORCH]
    code = (
        "import importlib, sys\n"
        f"for name in {HEAVY!r}: sys.modules[name] = None\n"
        f"for name in {wanted!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_every_module_imports_without_the_optional_packages() -> None:
    """PyTorch's CPU build brings no Triton: that is a usual machine, not a damaged one."""
    wanted = [s.module for s in sources() if s.room != "__main__"]
    code = f"""
import importlib, sys
for name in {EXTRA!r}: sys.modules[name] = None
bad = []
for name in {wanted!r}:
    try:
        importlib.import_module(name)
    except ImportError as e:
        bad.append(f"{{name}}: {{e}}")
print("\\n".join(bad)); sys.exit(bool(bad))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_needs_a_posix_module_at_import() -> None:
    wanted = [s.module for s in sources() if s.room != "__main__"]
    code = f"""
import importlib, sys
# Other people's packages are loaded before: what they need is their business.
for name in ("torch", "numpy", "starlette.applications", "uvicorn", "msgspec", "psutil", "jinja2",
             "tokenizers", "safetensors", "prometheus_client", "multiprocessing", "asyncio", "subprocess",
             "logging.handlers", "tempfile", "shutil"):
    importlib.import_module(name)
for name in {POSIX_ONLY!r}: sys.modules[name] = None
bad = []
for name in {wanted!r}:
    try:
        importlib.import_module(name)
    except ImportError as e:
        if (e.name or "").split(".")[0] not in {OPTIONAL!r}:
            bad.append(f"{{name}}: {{type(e).__name__}}: {{e}}")
print("\\n".join(bad)); sys.exit(bool(bad))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
