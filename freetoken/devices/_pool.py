"""Pools of equal units in one host buffer, shared by the devices that compute on the CPU.

Owns the buffer and its mapped length; the limit belongs to the `Ledger` that all pools of a device
share. Knows nothing of what a unit holds. Invariant: mapped units that were never written are zero,
unmapped bytes are poisoned (0xFF, a NaN in every float type), so a stale view shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freetoken.core.errors import CapacityError
from freetoken.core.interfaces import Faults, Pool
from freetoken.core.units import format_bytes

POISON = 0xFF


class Ledger:
    """What the pools of one device have mapped, against one limit (bytes)."""

    def __init__(self, limit_bytes: int, faults: Faults) -> None:
        self.limit_bytes = limit_bytes
        self.faults = faults
        self.mapped: dict[str, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - sum(self.mapped.values())

    def set(self, name: str, num_bytes: int) -> None:
        """Book `num_bytes` for the pool; CapacityError shows the sum. Nothing changes on failure."""
        if self.faults.fail_alloc:
            self.faults.fail_alloc -= 1
            if not self.faults.fail_alloc:
                raise CapacityError(
                    f"An injected failure hit the allocation of {format_bytes(num_bytes)} for {name}.",
                    code="out_of_device_memory",
                    hint="Retry with fewer units.",
                )
        others = {k: v for k, v in self.mapped.items() if k != name}
        total = sum(others.values()) + num_bytes
        if total > self.limit_bytes and num_bytes > self.mapped.get(name, 0):
            parts = " + ".join(f"{k} {format_bytes(v)}" for k, v in (others | {name: num_bytes}).items())
            raise CapacityError(
                f"{parts} = {format_bytes(total)}, but the device has {format_bytes(self.limit_bytes)}.",
                code="out_of_device_memory",
                hint="Lower --moe-cache-size or --num-tokens, or raise --gpu-memory.",
            )
        self.mapped[name] = num_bytes


def untouched_zeros(num_units: int, unit_bytes: int, phantom: bool) -> Tensor:
    """uint8 [num_units, unit_bytes], aligned to 64 bytes, which take memory when they are written to."""
    if phantom:
        return torch.empty(num_units, unit_bytes, dtype=torch.uint8, device="meta")
    size = num_units * unit_bytes
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + size]).view(num_units, unit_bytes)


class HostPool(Pool):
    """A pool in a lazily committed host buffer; `phantom` pools have sizes but no bytes."""

    def __init__(
        self,
        name: str,
        unit_bytes: int,
        num_units: int,
        bounds: tuple[int, int],
        ledger: Ledger,
        phantom: bool,
    ) -> None:
        self.name, self.unit_bytes = name, unit_bytes
        self.min_units, self.max_units = bounds
        self.generation = 0
        self._ledger = ledger
        self._check(num_units)
        ledger.set(name, num_units * unit_bytes)
        self._buffer = untouched_zeros(self.max_units, unit_bytes, phantom)
        self.num_units = self._most_units = num_units

    def view(self) -> Tensor:
        return self._buffer[: self.num_units]

    def resize(self, num_units: int) -> None:
        self._check(num_units)
        self._ledger.set(self.name, num_units * self.unit_bytes)
        self._map(num_units)
        self.generation += 1

    def relocate(self, src: Sequence[int], dst: Sequence[int]) -> None:
        view = self.view()
        for a, b in zip(src, dst, strict=True):
            view[b].copy_(view[a])

    def close(self) -> None:
        self._ledger.mapped.pop(self.name, None)
        self._buffer = self._buffer[:0].clone()
        self.num_units = 0

    def _map(self, num_units: int) -> None:
        if num_units < self.num_units:
            self._buffer[num_units : self.num_units].fill_(POISON)
        elif num_units > self.num_units:
            self._buffer[self.num_units : min(num_units, self._most_units)].zero_()
        self.num_units = num_units
        self._most_units = max(self._most_units, num_units)

    def _check(self, num_units: int) -> None:
        if not self.min_units <= num_units <= self.max_units:
            raise CapacityError(
                f"{self.name} can hold {self.min_units} to {self.max_units} units, not {num_units}.",
                code="pool_bounds",
                hint="Choose a size within these bounds.",
            )
