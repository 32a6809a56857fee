"""Bytes into units. Pure functions; the planner and the live memory manager use the same sums.

Invariant: the parts of a Division never sum to more than its total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken.core.errors import CapacityError
from freetoken.core.units import ceil_div, format_bytes


@dataclass(frozen=True)
class Sizes:
    """Unit sizes of one model on one device (bytes), and counts that don't depend on memory."""

    dense_bytes: int
    page_bytes: int
    page_size: int
    state_bytes: int
    record_bytes: int
    num_experts: int
    activation_bytes: int
    bank_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """All experts in host memory; layers of smaller records take less than a slot each."""
        return self.bank_bytes or self.num_experts * self.record_bytes


@dataclass(frozen=True)
class Division:
    """How device memory is divided. Every field in bytes but the unit counts."""

    total_bytes: int
    dense_bytes: int
    activation_bytes: int
    num_states: int
    state_bytes: int
    num_pages: int
    page_bytes: int
    num_slots: int
    slot_bytes: int

    @property
    def used_bytes(self) -> int:
        return (
            self.dense_bytes
            + self.activation_bytes
            + self.num_states * self.state_bytes
            + self.num_pages * self.page_bytes
            + self.num_slots * self.slot_bytes
        )

    def parts(self) -> list[tuple[str, int]]:
        """(what, bytes) of each part in use."""
        return [
            ("dense weights", self.dense_bytes),
            ("activations and rope", self.activation_bytes),
            (f"{self.num_states} states", self.num_states * self.state_bytes),
            (f"{self.num_pages} KV pages", self.num_pages * self.page_bytes),
            (f"{self.num_slots} expert slots", self.num_slots * self.slot_bytes),
        ]

    def __str__(self) -> str:
        return " + ".join(f"{what} {format_bytes(size)}" for what, size in self.parts() if size)


@dataclass(frozen=True)
class Demand:
    """What must fit. Unit counts include each pool's dummy unit; None = as many as fit.

    beside      (what, bytes) that lie in the same memory and belong to no pool: on a device that shares
                the host's memory, the experts and dense weights themselves
    limited_by  what sets the host's limit, for the error
    """

    num_states: int
    min_pages: int
    max_pages: int
    num_slots: int | None
    min_slots: int
    beside: tuple[tuple[str, int], ...] = ()
    limited_by: str = ""

    @property
    def beside_bytes(self) -> int:
        return sum(size for _, size in self.beside)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`, plus the dummy."""
    return ceil_div(max(tokens, 1), page_size) + 1


def divide(total_bytes: int, sizes: Sizes, demand: Demand) -> Division:
    """Divide device memory: explicit sizes first, then the KV floor, the rest to slots, then to KV.

    CapacityError shows the whole sum when the least demand does not fit.
    """
    fixed = sizes.dense_bytes + sizes.activation_bytes + demand.num_states * sizes.state_bytes
    fixed += demand.beside_bytes
    pages = demand.min_pages
    left = total_bytes - fixed - pages * sizes.page_bytes
    slots = demand.num_slots if demand.num_slots is not None else demand.min_slots
    if left < slots * sizes.record_bytes:
        raise _too_big(total_bytes, sizes, demand, slots)
    if demand.num_slots is None and sizes.record_bytes:
        slots = min(sizes.num_experts + 1, left // sizes.record_bytes)
    left -= slots * sizes.record_bytes
    if sizes.page_bytes:
        pages = min(demand.max_pages, pages + left // sizes.page_bytes)
    return Division(
        total_bytes=total_bytes,
        dense_bytes=sizes.dense_bytes,
        activation_bytes=sizes.activation_bytes,
        num_states=demand.num_states,
        state_bytes=sizes.state_bytes,
        num_pages=max(pages, demand.min_pages),
        page_bytes=sizes.page_bytes,
        num_slots=slots,
        slot_bytes=sizes.record_bytes,
    )


def _too_big(total: int, sizes: Sizes, demand: Demand, slots: int) -> CapacityError:
    wanted = Division(
        total_bytes=total,
        dense_bytes=sizes.dense_bytes,
        activation_bytes=sizes.activation_bytes,
        num_states=demand.num_states,
        state_bytes=sizes.state_bytes,
        num_pages=demand.min_pages,
        page_bytes=sizes.page_bytes,
        num_slots=slots,
        slot_bytes=sizes.record_bytes,
    )
    if demand.beside:
        return host_too_small([*demand.beside, *wanted.parts()], total, demand.limited_by)
    return CapacityError(
        f"{format_bytes(wanted.used_bytes)} wanted, {format_bytes(total)} available: {wanted}.",
        hint="Lower --moe-cache-size, --num-tokens or --max-running-requests, or raise --gpu-memory.",
    )


def host_too_small(parts: Sequence[tuple[str, int]], available: int, limited_by: str = "") -> CapacityError:
    """The error for a model that host memory can't hold, with the whole sum."""
    wanted = sum(size for _, size in parts)
    listed = " + ".join(f"{what} {format_bytes(size)}" for what, size in parts if size)
    there = f"{format_bytes(max(available, 0))} available" + (f" ({limited_by})" if limited_by else "")
    return CapacityError(
        f"Host memory: {format_bytes(wanted)} wanted, {there}: {listed}.",
        code="host_memory",
        hint="Close other programs, lower --num-tokens or --max-running-requests (--gpu-memory on a "
        "simulated device), or use a smaller or more strongly quantised model.",
    )
