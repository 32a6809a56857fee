"""Facts about this computer as the operating system tells them: CPU, memory, GPU, torch.

Imports neither torch nor a GPU package: the driver's own library is asked. Every probe answers on
every system and says why when it can't know. Nothing here decides anything.
"""

from __future__ import annotations

import ast
import ctypes
import ctypes.util
import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from freetoken.core.host_memory import host_memory
from freetoken.core.units import format_bytes

ISA = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Torch:
    """A torch installation, read without importing it. `cuda` is empty for a CPU build."""

    version: str
    cuda: str


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8", "replace"), re.MULTILINE)
        if found:
            return re.sub(r"\s+", " ", found[1]).strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def cpu_cores() -> tuple[int, int]:
    """(physical cores, threads this process may use)."""
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable), usable


def cpu_features() -> list[str]:
    """Instruction sets that matter for expert kernels; empty where the system doesn't list them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return []
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info.read_text("utf-8", "replace"), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return [name for name in ISA if name in flags]


def system() -> str:
    release = platform.release()
    wsl = " (WSL)" if "microsoft" in release.lower() else ""
    return f"{platform.system()} {release}{wsl} {platform.machine()}"


def torch_build() -> Torch | None:
    """The installed torch, or None. The build is read from its version file."""
    try:
        dist = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    cuda = ""
    path = Path(str(dist.locate_file("torch/version.py")))
    if path.exists():
        for node in ast.parse(path.read_text("utf-8")).body:
            name, value = _assignment(node)
            if name == "cuda" and isinstance(value, ast.Constant) and value.value:
                cuda = str(value.value)
    return Torch(dist.version, cuda)


def _assignment(node: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return "", None


def gpus() -> tuple[list[Gpu], str]:
    """NVIDIA GPUs as the driver lists them, and a sentence that says how they were or weren't found."""
    library, tried = _open_nvml()
    if library is None:
        return [], f"no NVIDIA driver library ({', '.join(tried)})"
    if library.nvmlInit_v2() != 0:
        return [], "the NVIDIA driver library is there, but the driver does not answer"
    try:
        return _list_gpus(library), "listed by the NVIDIA driver"
    finally:
        library.nvmlShutdown()


def _open_nvml() -> tuple[ctypes.CDLL | None, list[str]]:
    # Debian ships only the versioned name, Windows a DLL: all are tried before giving up.
    names = ["nvml.dll"] if sys.platform == "win32" else ["libnvidia-ml.so.1", "libnvidia-ml.so"]
    found = ctypes.util.find_library("nvidia-ml")
    for name in [*names, *([found] if found else [])]:
        try:
            return ctypes.CDLL(name), names
        except OSError:
            continue
    return None, names


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


def _list_gpus(library: ctypes.CDLL) -> list[Gpu]:
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    out = []
    for i in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)) != 0:
            continue
        name = ctypes.create_string_buffer(96)
        memory = _Memory()
        library.nvmlDeviceGetName(handle, name, 96)
        library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        out.append(Gpu(name.value.decode("utf-8", "replace"), int(memory.total), int(memory.free)))
    return out


def machine_line() -> str:
    """This machine in one line: CPU, cores, memory, GPU."""
    cores, threads = cpu_cores()
    memory = host_memory()
    found, _ = gpus()
    gpu = ", ".join(f"{g.name} {format_bytes(g.memory_bytes)}" for g in found) or "no NVIDIA GPU"
    free, total = format_bytes(memory.free_bytes), format_bytes(memory.total_bytes)
    return (
        f"{cpu_name()}, {cores} cores / {threads} threads, {free} of {total} {memory.limited_by} free, {gpu}"
    )
