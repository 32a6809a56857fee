"""What the native benches share: coded experts in memory, requests on them, windows of time.

Bytes are random, so nothing here says anything about answers. Working sets are read in turn and are larger
than any cache: four times the last level and at least `least` bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from freetoken.core import choices
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.interfaces import WeightFormat
from freetoken.core.units import ceil_div
from freetoken.experts.abi import OK, IoBlock
from freetoken.experts.bank import ExpertBank
from freetoken.experts.native_executor import describe
from freetoken.experts.record import layout
from freetoken.native.library import Library, library

GIB = 1 << 30
CACHED_BYTES = 256 << 10
MOST_THREADS = 1024
MOST_GIB = float(1 << 20)
Clock = Callable[[], float]


def require_library() -> Library:
    lib = library()
    if lib is None:
        raise ConfigError(
            "The native library is not here.", hint="Install a C++ compiler, then FreeToken again."
        )
    return lib


def check_arguments(args: argparse.Namespace) -> None:
    """What both native benches take: --threads, --size, --seconds."""
    if not all(1 <= count <= MOST_THREADS for count in args.threads or ()):
        raise ConfigError(f"--threads takes 1 to {MOST_THREADS}.", code="invalid_option")
    if not 0 <= args.size <= MOST_GIB:
        raise ConfigError("--size is a number of GiB, at least 0.", code="invalid_option")
    if not 0 < args.seconds < math.inf:
        raise ConfigError("--seconds is a number above 0.", code="invalid_option")


def last_level_cache() -> int:
    """Bytes of the largest CPU cache; 32 MiB if the system doesn't say."""
    sizes = [32 << 20]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes)


@dataclass
class Experts:
    """One layer of `bank.num_experts` equal experts of random weights."""

    fmt: str
    bank: ExpertBank
    int8: bool = False

    @property
    def used_bytes(self) -> int:
        """Bytes of one expert that computing it reads."""
        return self.bank.layouts[0].used_bytes

    def close(self) -> None:
        self.bank.buffer = torch.empty(0, dtype=torch.uint8)


def make(fmt: str, hidden: int, width: int, least: int = GIB) -> Experts:
    """Experts of a format that together are larger than any cache; least 0: just a few."""
    form: WeightFormat = choices.load("freetoken.quant", fmt).FORMAT
    one = layout(hidden, width, form)
    count = ceil_div(max(least, 4 * last_level_cache()), one.record_bytes) if least else 1
    try:
        bank = ExpertBank([one], [form], ceil_div(count, 32) * 32)
    except RuntimeError as error:
        raise CapacityError(f"{least >> 20} MiB of weights don't fit.", hint="See --size.") from error
    require_library().advise_huge(bank.buffer.data_ptr(), bank.buffer.numel())
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(width, hidden, generator=draw) * hidden**-0.5 for _ in range(3)]
    bank.put(0, 0, matrices[0], matrices[1], matrices[2].t())
    for expert in range(1, bank.num_experts):
        bank.record(expert).copy_(bank.record(0))
    return Experts(fmt, bank)


class Caller:
    """Requests of `experts` experts with `rows` rows each, walking through the bank."""

    def __init__(self, made: Experts, tier: str, experts: int, rows: int, tiles: int = 0) -> None:
        self._lib, one = require_library(), made.bank.layouts[0]
        described = describe(made.bank, 0, int8=made.int8)
        assert described is not None
        self._handle = self._lib.new_executor([described], tier)
        self._made, self._blocks = made, []
        last = tiles or one.num_tiles
        self.bytes = experts * (one.used_bytes if last == one.num_tiles else last * one.tile_bytes)
        x = torch.randn(rows, one.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
        span = experts if tiles else made.bank.num_experts
        for at in range(0, span - experts + 1, experts):
            io = IoBlock(
                one.hidden,
                x.dtype,
                max_items=experts,
                max_rows=experts * rows,
                max_tokens=rows,
                out_rows=experts * rows,
            )
            items = [(at + i, 0, last, i * rows, rows, i * rows) for i in range(experts)]
            io.items[:] = io.item_array(items, [0] * experts)
            io.rows[:] = torch.arange(rows, dtype=torch.int32).repeat(experts)
            io.x.copy_(x)
            io.request[:5] = torch.tensor([1, 0, experts, experts * rows, rows], dtype=torch.int32)
            self._blocks.append(io)
        self._turn = self._walk()

    def __call__(self) -> None:
        io = next(self._turn)
        assert self._lib.serve(self._handle, io.bytes.data_ptr(), io.out.data_ptr(), 60000) == OK

    def close(self) -> None:
        self._lib.free_executor(self._handle)

    def _walk(self) -> Iterator[IoBlock]:
        while True:
            yield from self._blocks


def window(call: Callable[[], None], seconds: float, clock: Clock = time.perf_counter) -> float:
    """Seconds of one call, by calling for a while, at least once."""
    count, began, spent = 0, clock(), 0.0
    while not count or spent < seconds:
        call()
        count += 1
        spent = clock() - began
    return spent / count


class Reader:
    """Plain reading of the same bytes, a slice after the other."""

    def __init__(self, made: Experts, tier: str = "") -> None:
        self._lib, self._data, self._at = require_library(), made.bank.buffer, 0
        self._tier = tier
        self.bytes = 64 << 20

    def __call__(self) -> None:
        if self._at + self.bytes > self._data.numel():
            self._at = 0
        self._lib.read(self._data.data_ptr() + self._at, self.bytes, self._tier)
        self._at += self.bytes


def interleaved(
    calls: list[Callable[[], None]], seconds: float, turns: int = 5, clock: Clock = time.perf_counter
) -> list[float]:
    """Median seconds of one call of each, measured in turns so that a busy moment hits all alike."""
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(turns):
        for times, call in zip(found, calls, strict=True):
            times.append(window(call, seconds / turns, clock))
    return [statistics.median(times) for times in found]
