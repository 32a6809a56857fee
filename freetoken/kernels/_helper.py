"""A process that compiles kernels for another one, which has too little of Python's lock for all of them.

Owner: `Helper` starts `python -c "... serve()"`, which imports Triton and torch, says so, and then takes one
request after the other. Both sides speak in pickles over the process's own pipes. What is compiled lies in
Triton's cache on disk; the answer only says whether it does. The process never opens a device, and ends when
its owner does: its input closes then.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from freetoken.kernels._triton import triton

PATIENCE_S = 60.0
_ROOT = str(Path(__file__).resolve().parents[2])
_START = f"import sys; sys.path.insert(0, {_ROOT!r}); from freetoken.kernels._helper import serve; serve()"


@dataclass(frozen=True)
class Request:
    """A kernel by its function's place, and how Triton has specialised it."""

    module: str
    function: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attrs: dict[Any, Any]
    target: Any
    options: dict[str, Any]

    @staticmethod
    def of(compile_one: Callable[[], Any]) -> Request:
        """What Triton's function would compile; KeyError if it isn't the one we know."""
        names = inspect.getclosurevars(compile_one).nonlocals
        src, options = names["src"], names["options"]
        place = (src.fn.__module__, src.fn.__name__, src.signature, src.constants, src.attrs)
        return Request(*place, names["target"], dict(vars(options)))

    def compile(self) -> bool:
        """Have it in the cache on disk; whether it was missing there."""
        missing: list[bool] = []
        triton.knobs.compilation.listener = lambda *, cache_hit, **facts: missing.append(not cache_hit)
        kernel = vars(importlib.import_module(self.module))[self.function]
        source = triton.compiler.ASTSource(kernel, self.signature, self.constants, self.attrs)
        triton.compile(source, target=self.target, options=self.options)
        return any(missing)


class Helper:
    """The owner's side. One thread at a time may use it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._in, self._out = (cast(BinaryIO, pipe) for pipe in (self._process.stdin, self._process.stdout))
        self._greeted = False

    def ready(self) -> bool:
        """Whether it has imported what it needs. Never blocks."""
        if not self._greeted and select.select([self._out], [], [], 0)[0]:
            pickle.load(self._out)
            self._greeted = True
        return self._greeted

    def compile(self, request: Request) -> bool:
        """Have it in the cache: whether it was missing, or a RuntimeError that tells why it can't be."""
        self._in.write(pickle.dumps(request))
        self._in.flush()
        if not select.select([self._out], [], [], PATIENCE_S)[0]:
            raise TimeoutError(f"no answer within {PATIENCE_S} s")
        answer = pickle.load(self._out)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return bool(answer)

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()


def serve() -> None:
    """The process's side: until there is no more to read."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the compiler may print
    answer: bool | str = True
    while True:
        pickle.dump(answer, sink)
        sink.flush()
        try:
            request = pickle.load(source)
        except EOFError:
            return
        try:
            answer = request.compile()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
