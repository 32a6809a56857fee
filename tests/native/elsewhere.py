"""The library on another machine: compiled beside a program that drives it, and asked through files.

`elsewhere.cpp` says how a request lies in a file. An emulator runs the program where this machine can't.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.core.units import align_up
from freetoken.experts.abi import IoBlock
from freetoken.experts.native_executor import describe
from freetoken.native import ops
from freetoken.native.program import Tape
from tests.native.build import One, lib

ROOT = Path(__file__).resolve().parents[2]


def program(folder: Path, name: str, compiler: str = "g++", flags: str = "") -> Path:
    """The library and `tests/native/<name>.cpp`, which drives it, by one compiler."""
    cached = "ccache " if shutil.which("ccache") else ""
    env = {**os.environ, "CXX": cached + compiler, "FT_CXXFLAGS": flags}
    made = folder / "library"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(made)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=1200)
    library = next(made.rglob("libfreetoken.so")).rename(folder / "libfreetoken.so")
    out, source = folder / name, ROOT / "tests" / "native" / f"{name}.cpp"
    link = [compiler, "-std=c++20", *flags.split(), str(source), str(library), "-pthread", "-o", str(out)]
    subprocess.run([*link, "-Wl,-rpath,$ORIGIN"], check=True, timeout=300)
    return out


@dataclass(frozen=True)
class Request:
    """What a file asks, and the tensors that its answer fills: (dtype, shape, where) in so many bytes."""

    asked: bytes
    parts: Sequence[tuple[torch.dtype, torch.Size, int]]
    num_bytes: int


def blobs(kind: int, *parts: bytes) -> bytes:
    return struct.pack("<Q", kind) + b"".join(struct.pack("<Q", len(p)) + p for p in parts)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def experts(made: One, io: IoBlock, *, int8: bool = False, **layer: float) -> Request:
    """`answer` of build.py, to be asked elsewhere."""
    described = describe(made.bank, 0, int8=int8)
    assert described is not None
    for name, value in layer.items():
        setattr(described, name, value)
    io.items[:, 6:] = 0  # no addresses: by their number
    asked = blobs(0, bytes(described), raw(made.bank.layer(0)), raw(io.bytes))
    return Request(asked, [(torch.float32, io.out.shape, 0)], io.out.numel() * 4)


def call(job: ctypes.Structure, *tensors: Tensor) -> Request:
    """A job of native/ops.py, whose addresses lie in contiguous tensors; its answer is all of these."""
    starts, end = [], 0
    assert all(tensor.is_contiguous() for tensor in tensors)
    for tensor in tensors:
        starts.append(end)
        end = align_up(end + tensor.nbytes, 64)
    memory, places = bytearray(end), b""
    for tensor, start in zip(tensors, starts, strict=True):
        memory[start : start + tensor.nbytes] = raw(tensor)
    for name, kind in job._fields_:
        address = getattr(job, name) if kind is ctypes.c_void_p else None
        if address:
            inside = [
                start + address - t.data_ptr()
                for t, start in zip(tensors, starts, strict=True)
                if 0 <= address - t.data_ptr() < t.nbytes
            ]
            places += struct.pack("<QQ", getattr(type(job), name).offset, *inside)
    asked = blobs(1, ops.JOBS[type(job)].encode(), bytes(job), places, bytes(memory))
    return Request(asked, [(t.dtype, t.shape, s) for t, s in zip(tensors, starts, strict=True)], end)


def recorded(run: Callable[[], Any]) -> tuple[ctypes.Structure, Any]:
    """The one job that `run` hands to this machine's library, and what it returns."""
    tape = Tape()
    with lib().recording(tape):
        returned = run()
    ((_, job, _),) = tape.jobs
    return job, returned


def aarch64(folder: Path, name: str) -> Elsewhere:
    """A program for aarch64; skips the test where this machine can't compile or run one."""
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if not shutil.which(compiler) or not shutil.which(emulator):
        pytest.skip(f"needs {compiler} and {emulator}")
    return Elsewhere(program(folder, name, compiler), [emulator, "-L", "/usr/aarch64-linux-gnu"])


@dataclass(frozen=True)
class Elsewhere:
    program: Path
    emulator: Sequence[str]

    def answers(self, tier: str, requests: Sequence[Request]) -> list[list[Tensor]]:
        """Every request's tensors, answered by one and by three threads, which must agree."""
        asked, said = self.program.with_suffix(".asked"), self.program.with_suffix(".said")
        asked.write_bytes(b"".join(r.asked for r in requests))
        self.run(tier, str(asked), str(said))
        data, out, at = bytearray(said.read_bytes()), [], 0
        for one in requests:
            out.append([])
            for dtype, shape, start in one.parts:
                part = torch.frombuffer(data, dtype=dtype, count=shape.numel(), offset=at + start)
                out[-1].append(part.view(shape))
            at += one.num_bytes
        return out

    def run(self, *arguments: str) -> str:
        command = [*self.emulator, str(self.program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout
