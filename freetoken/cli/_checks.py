"""The rows of `ft doctor`. A check never raises: what it can't find out is itself a finding.

Knows what a working installation looks like; knows no model and starts no engine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import freetoken
from freetoken.api import ports
from freetoken.cli import _host, _options
from freetoken.core import config_file, env, profile
from freetoken.core.errors import ConfigError, FreeTokenError
from freetoken.core.host_memory import host_memory
from freetoken.core.options import Options
from freetoken.core.units import GIB, format_bytes
from freetoken.native.library import library

PACKAGES = (
    "numpy",
    "safetensors",
    "tokenizers",
    "llguidance",
    "jinja2",
    "starlette",
    "uvicorn",
    "msgspec",
    "psutil",
    "prometheus-client",
)
ENTRY_POINT = "freetoken.cli.main:main"
FROM_CHECKOUT = "pip install -e . from the checkout, in a fresh virtual environment"
AGAIN = "pip install -e . once more in the checkout (./scripts/run.sh does it)"


@dataclass(frozen=True)
class Check:
    """state is `good`, `warn` or `bad`; `hint` says what to do, empty if nothing."""

    name: str
    state: str
    fact: str
    hint: str = ""


def all_checks(args: argparse.Namespace) -> list[Check]:
    options, rows = _options_checks(args)
    makers: list[Callable[[], Iterator[Check]]] = [
        _freetoken,
        _foreign,
        _python,
        _packages,
        _torch,
        _cpu,
        _native,
        _profile,
        _memory,
        _gpu,
        lambda: _disk(options),
        lambda: _model(options),
        lambda: _port(options),
    ]
    out = []
    for make in makers:
        try:
            out += list(make())
        except Exception as e:
            name = getattr(make, "__name__", "check").strip("_")
            out.append(Check(name, "warn", f"could not be checked: {type(e).__name__}: {e}"))
    return out + rows


def _options_checks(args: argparse.Namespace) -> tuple[Options, list[Check]]:
    where = str(getattr(args, "config", None) or config_file.default_path())
    try:
        resolved = _options.resolve(args)
    except FreeTokenError as e:
        return Options(), [Check("options", "bad", f"error [{e.code}]: {e.message}", e.hint)]
    given = [f"{n} ({w})" for n, w in resolved.origin.items() if w in ("environment", "config.toml")]
    exists = "" if Path(where).exists() else " (not there, that is fine)"
    rows = [Check("config", "good", where + exists)]
    if given:
        rows.append(Check("options", "good", "set: " + ", ".join(given)))
    return resolved.options, rows


def _freetoken() -> Iterator[Check]:
    yield Check("freetoken", "good", f"{freetoken.__version__} in {module_folder()}")


def module_folder() -> Path:
    return Path(freetoken.__file__).resolve().parent


def _foreign() -> Iterator[Check]:
    """Another project owns the name on the public index; both can't live in one environment."""
    found = foreign_copies([Path(p) for p in sys.path if p], module_folder())
    for fact in found:
        yield Check(
            "foreign copy", "bad", fact, f"Remove it (pip uninstall freetoken), then {FROM_CHECKOUT}."
        )
    command = shutil.which("ft")
    if command and not _starts_us(Path(command)):
        yield Check(
            "ft command",
            "warn",
            f"{command} starts another program",
            "Activate this environment, or call: python -m freetoken",
        )


def foreign_copies(folders: list[Path], ours: Path) -> list[str]:
    """Sentences about packages or distributions named `freetoken` that are not this one."""
    out = []
    for folder in folders:
        package = folder / "freetoken"
        if package.is_dir() and package.resolve() != ours and any(package.glob("*.py")):
            out.append(f"a package of the same name lies in {package}")
    paths = [str(f) for f in folders]
    for dist in importlib.metadata.distributions(name="freetoken", path=paths):
        targets = [e.value for e in dist.entry_points if e.group == "console_scripts"]
        if ENTRY_POINT not in targets:
            out.append(f"distribution freetoken {dist.version} belongs to another project of that name")
    return sorted(set(out))


def _starts_us(command: Path) -> bool:
    try:
        body = command.read_bytes()
    except OSError:
        return True
    return b"freetoken" in body


def _python() -> Iterator[Check]:
    version = ".".join(str(n) for n in sys.version_info[:3])
    yield Check("python", "good", f"{version} on {_host.system()}")


def _packages() -> Iterator[Check]:
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Check("packages", "bad", f"missing: {', '.join(missing)}", f"Run {AGAIN}.")
    yield Check("packages", "good", ", ".join(versions))


def _torch() -> Iterator[Check]:
    build = _host.torch_build()
    if build is None:
        yield Check("torch", "bad", "not installed", f"Run {FROM_CHECKOUT}.")
        return
    kind = f"CUDA {build.cuda}" if build.cuda else "CPU build"
    yield Check("torch", "good", f"{build.version} ({kind})")


def _cpu() -> Iterator[Check]:
    cores, threads = _host.cpu_cores()
    features = ", ".join(_host.cpu_features())
    fact = f"{_host.cpu_name()}, {cores} cores, {threads} threads" + (f", {features}" if features else "")
    yield Check("cpu", "good", fact)


def _native() -> Iterator[Check]:
    found = library()
    if found is None:
        hint = f"Install a C++ compiler (g++), then {AGAIN}."
        yield Check("native", "warn", "no native library: experts are computed by torch, slower", hint)
        return
    yield Check("native", "good", f"{found.tier} of {', '.join(found.tiers)}")


def _profile() -> Iterator[Check]:
    known = profile.load()
    if known is None:
        yield Check("profile", "good", "not measured yet", "ft bench bw measures what memory gives")
        return
    fact = f"{known.host_bw / 1e9:.1f} GB/s with {known.threads} threads, measured {known.date}"
    yield Check("profile", "good", fact)


def _memory() -> Iterator[Check]:
    memory = host_memory()
    fact = (
        f"{format_bytes(memory.free_bytes)} free of {format_bytes(memory.total_bytes)} ({memory.limited_by})"
    )
    if memory.free_bytes < GIB:
        yield Check("memory", "warn", fact, "The demo model needs about 1 GiB; close something first.")
    else:
        yield Check("memory", "good", fact)


def _gpu() -> Iterator[Check]:
    found, how = _host.gpus()
    if not found:
        hint = "Everything runs on the CPU; that is a supported way to use FreeToken."
        yield Check("gpu", "good", f"none: {how}", hint)
        return
    for gpu in found:
        fact = f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)}"
        yield Check("gpu", "warn", fact, "This version has no CUDA kernels yet and computes on the CPU.")
    build = _host.torch_build()
    if build and not build.cuda:
        yield Check("gpu", "warn", "torch is a CPU build, so it cannot use the GPU")


def _disk(options: Options) -> Iterator[Check]:
    for name, folder in (("settings", env.home()), ("model", Path(options.model) if options.model else None)):
        if folder is None:
            continue
        at = next((p for p in (folder, *folder.parents) if p.exists()), None)
        if at is None:
            continue
        free = shutil.disk_usage(at).free
        fact = f"{format_bytes(free)} free for {name} ({folder})"
        if free < GIB // 4:
            yield Check("disk", "warn", fact, "Profiles and traces may not be written.")
        else:
            yield Check("disk", "good", fact)


def _model(options: Options) -> Iterator[Check]:
    folder = Path(options.model) if options.model else module_folder() / "data" / "demo-model"
    name = str(folder) if options.model else "the embedded demo model"
    if not (folder / "config.json").exists():
        hint = (
            "Name a checkpoint folder that holds config.json." if options.model else f"Run {FROM_CHECKOUT}."
        )
        yield Check("model", "bad", f"{name}: there is no config.json in {folder}", hint)
        return
    shards = sorted(folder.glob("*.safetensors"))
    size = sum(p.stat().st_size for p in shards)
    if not shards:
        yield Check("model", "bad", f"{name}: no .safetensors files in {folder}", "Fetch the weights too.")
        return
    yield Check("model", "good", f"{name}: {len(shards)} weight files, {format_bytes(size)}")


def _port(options: Options) -> Iterator[Check]:
    try:
        ports.bind(options.host, options.port).close()
    except ConfigError as e:
        yield Check("port", "warn", e.message, e.hint)
        return
    yield Check("port", "good", f"{options.host}:{options.port} is free")
