"""Builds the native library with the machine's C++ compiler; pyproject.toml holds everything else.

One shared library without Python or torch in it, loaded through ctypes, so one wheel serves every Python
version. Each file of `TIERED` is compiled once per instruction-set tier; the library picks at run time.
Without a compiler the package installs all the same and computes with torch.

Objects stay in build/objects with a hash of all that made them, so building again, for an installation or in
a moved checkout, compiles what is not the same.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("freetoken/native")
OBJECTS = Path("build/objects")
PLAIN = ("api", "executor", "isa", "layer", "loading", "poller", "pool", "stored", "unblock", "matrix")
INT8 = ("int8", "int8_panel")
"""Products of bytes; a tier that says FT_INT8_ONLY adds them to the one below."""
FORMATS = sorted((FOLDER / "formats").glob("*.cpp"))
TOGETHER = 4
"""Formats that are compiled as one file: the compiler's own headers cost a second each time."""
TIERED = ("tier", "linear", "ops", *(f"formats/{p.stem}" for p in FORMATS[::TOGETHER]))
X86, ARM = ("x86_64-", "amd64-"), ("aarch64-", "arm64-")
"""How compilers call a machine."""
AVX512 = ["-DFT_AVX512", *(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")), "-mfma", "-mf16c"]
AVX2 = ["-DFT_AVX2", "-mavx2", "-mfma", "-mf16c"]
X86_TIERS = {
    "avx2": AVX2,
    "avx2_vnni": [*AVX2, "-DFT_INT8_ONLY", "-DFT_AVX_VNNI", "-mavxvnni"],
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-DFT_BF16_DOT", "-mavx512bf16", "-mavx512vnni"],
}
ARM_TIERS = {"neon": ["-DFT_NEON"]}
NO_INT8 = ("avx512", "neon")
"""Their products of bytes are another tier's (tier.cpp)."""
AMX = [*X86_TIERS["avx512_bf16"], "-mavx512vbmi", "-mamx-tile", "-mamx-bf16"]
"""Two files more for the last of these; a compiler that doesn't know it leaves them out."""
# -ffp-contract=off: what is fused is written as such, so every compiler gives the same bits.
FLAGS = [
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall",
    "-Wextra", "-Wno-ignored-attributes", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi",
]  # fmt: skip


def compiler() -> list[str]:
    return os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"]


def extra_flags() -> list[str]:
    """FT_CXXFLAGS goes to every file and to the linker: sanitisers."""
    return os.environ.get("FT_CXXFLAGS", "").split()


def target() -> str:
    """What the compiler compiles for: x86_64-linux-gnu, aarch64-linux-gnu, arm64-apple-darwin24.1.0."""
    return subprocess.run([*compiler(), "-dumpmachine"], capture_output=True, text=True).stdout.strip()


def knows_amx(machine: str) -> bool:
    if not machine.startswith(X86) or "linux" not in machine:
        return False
    call = [*compiler(), "-mamx-tile", "-mamx-bf16", "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(call, capture_output=True).returncode == 0


def jobs(machine: str, amx: bool) -> list[tuple[str, str, list[str]]]:
    """(tier, file, flags) of every object, those that take longest first, so that all cores end together."""
    x86, arm = machine.startswith(X86), machine.startswith(ARM)
    have = {"X86": x86, "AMX": amx, "NEON": arm}
    known = [f"-DFT_HAVE_{name}" for name, there in have.items() if there]
    out = [("plain", name, known) for name in PLAIN]
    out += [("amx", name, ["-DFT_NS=ft_amx", *AMX]) for name in ("amx", "digits")] if amx else []
    tiers: dict[str, list[str]] = {"scalar": [], **(X86_TIERS if x86 else ARM_TIERS if arm else {})}
    for tier, flags in tiers.items():
        names = ("tier",) if "-DFT_INT8_ONLY" in flags else TIERED
        names += () if tier in NO_INT8 else INT8
        out += [(tier, name, [f"-DFT_TIER={tier}", f"-DFT_NS=ft_{tier}", *flags]) for name in names]
    return sorted(out[::-1], key=lambda job: job[1] != "int8")


def beside(name: str) -> list[str]:
    """What is compiled along with a file."""
    names = [f"formats/{p.stem}" for p in FORMATS]
    if name not in names:
        return []
    at = names.index(name)
    return [part for p in FORMATS[at + 1 : at + TOGETHER] for part in ("-include", str(p))]


def hashed(*parts: str | bytes) -> str:
    out = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        out.update(len(data).to_bytes(8, "little") + data)
    return out.hexdigest()


class BuildNative(build_ext):
    """Compiles all objects side by side; failing is one warning, since the extension is optional."""

    def get_ext_filename(self, fullname: str) -> str:
        suffix = ".dll" if os.name == "nt" else ".dylib" if sys.platform == "darwin" else ".so"
        return os.path.join(*fullname.split(".")[:-1], f"libfreetoken{suffix}")

    def build_extension(self, ext: Extension) -> None:
        try:
            if os.name == "nt":
                raise RuntimeError("it is built with GCC or Clang")
            self._compiler = " ".join(compiler()) + self._call("--version")
            machine = target()
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                objects = list(pool.map(self._compile, jobs(machine, knows_amx(machine))))
            library = Path(self.get_ext_fullpath(ext.name))
            library.parent.mkdir(parents=True, exist_ok=True)
            fresh = library.with_suffix(".new")
            self._call("-shared", "-pthread", *extra_flags(), *objects, "-o", str(fresh))
            os.replace(fresh, library)  # running processes keep the old one
        except Exception as error:
            raise CompileError(f"no native library, torch computes instead: {error}") from error

    def _compile(self, job: tuple[str, str, list[str]]) -> str:
        """Compile one file for one tier unless that is done; return the object's path."""
        tier, name, flags = job
        flags = [*FLAGS, *flags, *extra_flags(), *beside(name)]
        made_by = hashed(self._compiler, *flags)
        out = OBJECTS / f"{tier}-{made_by[:8]}" / f"{name}.o"
        out.parent.mkdir(parents=True, exist_ok=True)
        key = out.with_suffix(".key")
        if not out.exists() or not key.exists() or key.read_text() != self._key(made_by, out):
            key.unlink(missing_ok=True)
            started = time.time()
            self._call(*flags, "-MMD", "-c", str(FOLDER / f"{name}.cpp"), "-o", str(out))
            if all(p.stat().st_mtime < started for p in self._sources(out)):  # else edited meanwhile, perhaps
                key.write_text(self._key(made_by, out))
        return str(out)

    @staticmethod
    def _sources(out: Path) -> list[Path]:
        """What an object was made of, which the compiler has noted beside it."""
        note = out.with_suffix(".d")
        words = note.read_text().replace("\\\n", " ").split() if note.exists() else []
        return [Path(name) for name in words[1:]]

    def _key(self, made_by: str, out: Path) -> str:
        """A hash of an object, what made it and what it was made of; empty if some of that is gone."""
        sources = self._sources(out)
        if not sources or not all(p.exists() for p in sources):
            return ""
        return hashed(made_by, out.read_bytes(), *(p.read_bytes() for p in sources))

    @staticmethod
    def _call(*arguments: str) -> str:
        done = subprocess.run([*compiler(), *arguments], capture_output=True, text=True)
        if done.stderr:
            print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise RuntimeError(f"{compiler()[0]} failed: {done.stderr[-500:]}")
        return done.stdout


class Wheel(bdist_wheel):
    """py3-none-<platform>: the library knows no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


native: Any = Extension("freetoken.native.library_file", sources=[], optional=True)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel})
