"""A card that isn't here: Triton compiles for it, and what it would launch is counted.

Makers of `Both` ask for the kernels of a Triton maker and let the reference compute, so that a whole engine
runs on a CPU and asks Triton for what it would ask for on the card.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
import triton.compiler
from triton.backends.compiler import GPUTarget

from freetoken.core import choices
from freetoken.kernels import _triton

ARCH = 86
_numbers = itertools.count(100)


class Card:
    """A driver for Triton. launched: kernels by name; launchers: what was made to start them."""

    def __init__(self, arch: int = ARCH) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.number = next(_numbers)  # Triton keeps what it has compiled by device
        self.launched: list[str] = []
        self.launchers: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 99 << 10},
            load_binary=lambda *facts: (1, 1, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        self.launchers.append(src.name)
        return lambda *args: self.launched.append(src.name)


@contextmanager
def plugged_in(arch: int = ARCH) -> Iterator[Card]:
    """Triton finds a card while the block lasts."""
    driver = triton.runtime.driver
    before, card = driver._active, Card(arch)
    driver.set_active(card)
    try:
        yield card
    finally:
        driver._active = before


class Unmade:
    """Stands for the compiler.

    made      name, types, constants, alignments and options of each kernel
    waited    those among their names that a launch waited for
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.made: list[tuple[str, ...]] = []
        self.waited: list[str] = []
        self._compile, self._kernels = triton.compiler.compile, []

    def __call__(self, src: Any, target: GPUTarget, options: dict[str, Any], **how: Any) -> Any:
        assert target == self.card.target
        self._kernels.append(src.fn)
        name = f"{src.fn.__module__}.{src.name}"
        self.made.append((name, *map(str, (src.signature, src.constants, src.attrs, options))))
        if threading.current_thread() is threading.main_thread():
            self.waited.append(name)
        if (listener := triton.knobs.compilation.listener) is not None:
            listener(src=src, metadata={}, metadata_group={}, times=None, cache_hit=False)
        return SimpleNamespace(
            src=src,
            metadata=None,
            function=1,
            packed_metadata=(),
            launch_metadata=lambda *args: None,
            run=lambda *args: self.card.launched.append(name),
        )

    def forget(self) -> None:
        """Triton's functions keep the compiler that they met last."""
        for kernel in self._kernels:
            kernel.compile = self._compile


THEIR_OWN = ("num_runs", "sort_routes")
"""Functions whose answer is read by the same maker only, so Triton's counts."""


def both(op: str, busy: list[str]) -> ModuleType:
    """Both makers of an operation as one. busy: not empty while a reference computes."""
    ours, plain = (
        importlib.import_module(f"freetoken.kernels.{op}.{name}") for name in ("triton", "reference")
    )

    def joined(name: str) -> Callable[..., Any]:
        ask, compute = getattr(ours, name), getattr(plain, name)

        def call(*args: Any) -> Any:
            if busy:
                return compute(*args)
            garbage = ask(*args)
            if _triton.TAKER.get() is not None or name in THEIR_OWN:
                return garbage
            busy.append(op)
            try:
                return compute(*args)
            finally:
                busy.pop()

        return call

    shared = [name for name, it in vars(plain).items() if isinstance(it, FunctionType) and name in vars(ours)]
    module = ModuleType(f"both.{op}")
    vars(module).update({name: joined(name) for name in shared})
    vars(module).update(RANK=99, supports=lambda device_type: device_type == "cpu")
    return module


def use_both_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that has a Triton maker gets its launches, too."""
    busy: list[str] = []
    for op in choices.names("freetoken.kernels"):
        module = importlib.import_module(f"freetoken.kernels.{op}")
        makers = vars(module).get("MAKERS", ())
        if any(maker.__name__.endswith(".triton") for maker in makers):
            monkeypatch.setattr(module, "MAKERS", (*makers, both(op, busy)))
