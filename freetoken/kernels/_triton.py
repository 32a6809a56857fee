"""The one file that imports Triton, and what all of its kernels share: launches as data, device facts.

A Triton maker builds a list of `Launch` and runs it. Because a launch is data, the same host code that
serves a request can be compiled ahead of time for cards that are not here (tests/kernels). Importing this
file never fails: without Triton `AVAILABLE` is false and `jit` returns the function as it is.
Invariant: nothing here asks the device for a value, so everything may be captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

try:
    import triton as triton
    import triton.language as tl
    import triton.language.extra.cuda as gdc
except ImportError:
    triton = tl = gdc = None

AVAILABLE = triton is not None
INTERPRETED = bool(AVAILABLE and triton.knobs.runtime.interpret)
LEAST_ARCH = 80
HALF = (torch.bfloat16, torch.float16)


def supports(device_type: str) -> bool:
    """Triton kernels run on CUDA devices of compute capability 8.0 and up."""
    return AVAILABLE and device_type == "cuda" and torch.cuda.is_available() and _usable()


@functools.cache
def _usable() -> bool:
    return bool(torch.cuda.get_device_capability() >= (LEAST_ARCH // 10, LEAST_ARCH % 10))


def jit(function: Callable[..., Any] | None = None, *, varying: Sequence[str] = ()) -> Any:
    """Mark a kernel. varying: ints that change from call to call and must not lead to new compilations."""
    if function is None:
        return functools.partial(jit, varying=varying)
    if not AVAILABLE:
        return function
    return triton.jit(function, do_not_specialize=list(varying) or None)


def folded(function: Callable[..., Any]) -> Any:
    """Mark a function of compile-time numbers that kernels call while they are compiled."""
    return triton.constexpr_function(function) if AVAILABLE else function


@contextlib.contextmanager
def compilations(tell: Callable[[], None]) -> Generator[None]:
    """While the block lasts, tell() each time a kernel was compiled or read from the disk's cache."""
    if not AVAILABLE:
        yield
        return
    knobs = triton.knobs.runtime
    before = knobs.jit_post_compile_hook

    def hook(**facts: Any) -> Any:
        tell()
        return before(**facts) if before is not None else None

    knobs.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.jit_post_compile_hook = before


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    args    in the kernel's order: tensors, ints, floats, None where a pointer is not given
    consts  its compile-time arguments
    registers   most registers of a thread, 0 = the compiler's choice
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    consts: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    registers: int = 0

    def __call__(self) -> None:
        taker = TAKER.get()
        if taker is None:
            self.run()
        else:
            taker(self)

    def run(self, *, warmup: bool = False) -> None:
        """warmup: have the kernel ready, launch nothing."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers:
            options["maxnreg"] = self.registers
        if self.consts.get("PDL"):
            options["launch_pdl"] = True
        self.kernel.run(*self.args, grid=self.grid, warmup=warmup, **self.consts, **options)


TAKER: ContextVar[Callable[[Launch], None] | None] = ContextVar("taker", default=None)
"""Who gets the launches of this context instead of the device: a rehearsal (`kernels._rehearsal`)."""


@dataclass(frozen=True)
class Card:
    """What a choice of configuration may ask of a device: the SM version (90) and how many SMs it has."""

    arch: int
    sms: int

    @property
    def pdl(self) -> bool:
        """Whether a kernel may start before the one whose results it waits for has ended (`_pdl`)."""
        return self.arch >= 90

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may use."""
        return 227 << 10 if self.arch in (90, 100) else 163 << 10 if self.arch == 80 else 99 << 10


def card(device: torch.device) -> Card:
    """The card of a device; the smallest one where kernels are interpreted."""
    return _card(device.index or 0) if device.type == "cuda" else Card(86, 8)


@functools.cache
def _card(index: int) -> Card:
    facts = torch.cuda.get_device_properties(index)
    return Card(facts.major * 10 + facts.minor, facts.multi_processor_count)


def constexpr(value: Any) -> Any:
    """A number of a module that its kernels read. Without Triton it is just the number: it has to be there,
    since other modules import it."""
    return tl.constexpr(value) if AVAILABLE else value


def power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


def floor_power_of_two(n: int) -> int:
    """The largest power of two <= n, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def aligned(tensor: Tensor) -> bool:
    """Whether loads of 16 bytes may start at the tensor."""
    return bool(tensor.data_ptr() % 16 == 0)
