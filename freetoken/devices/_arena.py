"""Pools whose addresses never change: reserved ranges into which memory is mapped and unmapped.

A captured graph keeps pointers, so a pool reserves room for its most units once and maps physical
chunks behind the first `num_units`. Owns chunks and the tensor over the range; the limit is the
`Ledger`'s. Invariant: mapped units that were never written are zero; a failed growth leaves all as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core.errors import CapacityError, FreeTokenError
from freetoken.core.interfaces import Pool
from freetoken.core.units import MIB, align_up, ceil_div
from freetoken.devices._driver import Driver
from freetoken.devices._pool import Ledger

LARGE_CHUNK, SMALL_CHUNK = 32 * MIB, 2 * MIB
LARGE_POOL = 512 * MIB


class _Range:
    """What torch needs to see an address range as a tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":  # a driver that isn't one: tests
        there = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(there, dtype=torch.uint8)
    return torch.as_tensor(_Range(address, num_bytes), device=device)


class ArenaPool(Pool):
    def __init__(
        self,
        name: str,
        unit_bytes: int,
        num_units: int,
        bounds: tuple[int, int],
        ledger: Ledger,
        where: tuple[Driver, torch.device],
    ) -> None:
        self.name, self.unit_bytes = name, unit_bytes
        self.min_units, self.max_units = bounds
        self.generation = 0
        self.num_units = 0
        (self._driver, self._device), self._ledger = where, ledger
        driver, device = where
        whole = self.max_units * unit_bytes
        grain = driver.granularity(device.index)
        self._chunk = align_up(LARGE_CHUNK if whole >= LARGE_POOL else SMALL_CHUNK, grain)
        self._reserved = align_up(whole, self._chunk)
        self._base = driver.reserve(self._reserved)
        self._handles: list[int] = []
        self._view = torch.empty(0, dtype=torch.uint8, device=device)
        try:
            self.resize(num_units)
        except FreeTokenError:
            self.close()
            raise
        self.generation = 0

    @property
    def base(self) -> int:
        """Device address of unit 0; never changes."""
        return self._base

    def view(self) -> Tensor:
        return self._view

    def resize(self, num_units: int) -> None:
        if not self.min_units <= num_units <= self.max_units:
            raise CapacityError(
                f"{self.name} can hold {self.min_units} to {self.max_units} units, not {num_units}.",
                code="pool_bounds",
                hint="Choose a size within these bounds.",
            )
        wanted = ceil_div(num_units * self.unit_bytes, self._chunk)
        self._ledger.set(self.name, wanted * self._chunk)
        try:
            self._map(wanted)
        except FreeTokenError:
            self._ledger.set(self.name, len(self._handles) * self._chunk)
            raise
        before, self.num_units = self.num_units, num_units
        flat = _bytes_at(self._base, num_units * self.unit_bytes, self._device)
        self._view = flat.view(num_units, self.unit_bytes)
        if num_units > before:
            self._view[before:].zero_()
        self.generation += 1

    def relocate(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for a, b in zip(src, dst, strict=True):
            self._view[b].copy_(self._view[a])

    def close(self) -> None:
        if not self._base:
            return
        self._view = self._view[:0].clone()
        self._map(0)
        self._driver.unreserve(self._base, self._reserved)
        self._ledger.mapped.pop(self.name, None)
        self._base = self.num_units = 0

    def _map(self, wanted: int) -> None:
        """Have `wanted` chunks mapped, or as many as before if that fails."""
        had = len(self._handles)
        try:
            while len(self._handles) < wanted:
                at = self._base + len(self._handles) * self._chunk
                self._handles.append(self._driver.map(at, self._chunk, self._device.index))
        except FreeTokenError:
            self._unmap(had)
            raise
        if len(self._handles) > wanted:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._unmap(wanted)

    def _unmap(self, wanted: int) -> None:
        while len(self._handles) > wanted:
            handle = self._handles.pop()
            self._driver.unmap(self._base + len(self._handles) * self._chunk, self._chunk, handle)
