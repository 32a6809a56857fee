"""Which rows each routed expert computes: one layer's routing turned inside out.

Experts are ordered by (padded rows, id) so that equal shapes sit side by side and go through one
batched multiplication. Owns integers only. Invariant: the padded rows M of an expert depend on its own
row count alone, so its arithmetic is the same whoever computes it and whatever it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64
EXACT_BLOCK = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Experts with equally many padded rows.

    experts   int64 [n]      ids within the layer, ascending
    rows      int64 [n, M]   token of each row, ascending; T (one past the end) for padding
    offset    int            first row of the group in the layer's output
    block     int            rows of one multiplication; M is a multiple of it
    """

    experts: Ints
    rows: Tensor
    offset: int
    block: int

    @property
    def padded(self) -> int:
        return int(self.rows.shape[1])

    def part(self, places: Ints) -> Group:
        """Some of the experts, without a place in the output."""
        return Group(self.experts[places], self.rows[torch.from_numpy(places)], 0, self.block)

    def slab(self, z: Tensor) -> Tensor:
        """The group's part of the layer's output as [n, M, H], a view."""
        n, m = self.rows.shape
        return z[self.offset : self.offset + n * m].view(n, m, -1)


@dataclass(frozen=True)
class RowPlan:
    """One layer's routed experts and their rows.

    experts    int64 [n]      distinct experts, ascending
    counts     int64 [n]      live rows of each
    group_of   int64 [n]      group and place within it, per expert
    place_of   int64 [n]
    positions  int64 [T, k]   where the output of route (t, j) lies; `num_rows` for a dead route
    routes     int64 [rows]   the route t * k + j of each row; 0 for padding
    """

    experts: Ints
    counts: Ints
    groups: tuple[Group, ...]
    group_of: Ints
    place_of: Ints
    positions: Tensor
    routes: Tensor
    num_rows: int
    num_tokens: int
    any_dead: bool


def padded_rows(counts: Ints, exact: bool) -> Ints:
    """Rows that an expert with `counts` live rows is computed with: a power of two, then blocks."""
    if exact:
        return -(-counts // EXACT_BLOCK) * EXACT_BLOCK
    powers: Ints = 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
    return np.where(counts <= BLOCK, powers, -(-counts // BLOCK) * BLOCK)


def plan_rows(ids: Tensor, exact: bool = False) -> RowPlan:
    """Invert `ids` int32 [T, k] (ascending within a row, -1 = dead)."""
    host: NDArray[np.int32] = ids.numpy()
    if host.shape[0] == 1 and host[0, 0] >= 0:
        return _single(host, exact)
    return _many(host, exact)


def _single(host: NDArray[np.int32], exact: bool) -> RowPlan:
    """One live row: every expert has one row, which is the common case while decoding."""
    k = host.shape[1]
    m = EXACT_BLOCK if exact else 1
    rows = torch.zeros((k, 1), dtype=torch.int64)
    if m > 1:
        rows = torch.ones((k, m), dtype=torch.int64)
        rows[:, 0] = 0
    experts = host[0].astype(np.int64)
    group = Group(experts, rows, 0, m)
    zeros, places = np.zeros(k, np.int64), np.arange(k)
    positions = torch.arange(0, k * m, m).view(1, k)
    routes = torch.zeros(k * m, dtype=torch.int64)
    routes[::m] = torch.arange(k)
    return RowPlan(experts, zeros + 1, (group,), zeros, places, positions, routes, k * m, 1, False)


def _many(host: NDArray[np.int32], exact: bool) -> RowPlan:
    tokens, k = host.shape
    flat = host.reshape(-1).astype(np.int64)
    live = flat >= 0
    routes = np.flatnonzero(live)
    routes = routes[np.argsort(flat[routes], kind="stable")]
    experts, starts, counts = np.unique(flat[routes], return_index=True, return_counts=True)
    padded = padded_rows(counts, exact)
    order = np.lexsort((experts, padded))
    offsets = np.zeros(len(experts), np.int64)
    offsets[order] = np.cumsum(padded[order]) - padded[order]
    total = int(padded.sum())
    within = np.arange(len(routes)) - np.repeat(starts, counts)
    at = np.repeat(offsets, counts) + within
    row_list = np.full(total, tokens, np.int64)
    row_list[at] = routes // k
    route_list = np.zeros(total, np.int64)
    route_list[at] = routes
    positions = np.full(tokens * k, total, np.int64)
    positions[routes] = at
    groups: list[Group] = []
    group_of, place_of = np.zeros(len(experts), np.int64), np.zeros(len(experts), np.int64)
    for m in np.unique(padded):
        members = np.flatnonzero(padded == m)
        group_of[members], place_of[members] = len(groups), np.arange(len(members))
        start = int(offsets[members[0]])
        rows = torch.from_numpy(row_list[start : start + len(members) * int(m)]).view(len(members), int(m))
        block = EXACT_BLOCK if exact else min(int(m), BLOCK)
        groups.append(Group(experts[members], rows, start, block))
    return RowPlan(
        experts=experts,
        counts=counts,
        groups=tuple(groups),
        group_of=group_of,
        place_of=place_of,
        positions=torch.from_numpy(positions).view(tokens, k),
        routes=torch.from_numpy(route_list),
        num_rows=total,
        num_tokens=tokens,
        any_dead=len(routes) < tokens * k,
    )


def accumulate_routes(y: Tensor, z: Tensor, plan: RowPlan, members: Ints, weights: Tensor) -> None:
    """y[t] += w z of the plan's experts `members`, one expert after the other.

    In ascending order over calls that is the same sum, bit for bit, as `reduce_routes`.
    """
    flat = weights.flatten()
    for member in members.tolist():
        group = plan.groups[plan.group_of[member]]
        place, count = int(plan.place_of[member]), int(plan.counts[member])
        start = group.offset + place * group.padded
        tokens = group.rows[place, :count]
        share = torch.index_select(flat, 0, plan.routes[start : start + count])
        y[tokens] = torch.index_select(y, 0, tokens) + share[:, None] * z[start : start + count]


def reduce_routes(z: Tensor, plan: RowPlan, weights: Tensor) -> Tensor:
    """Sum routes in ascending expert id: y[t] = ((0 + w0 z0) + w1 z1) + ...

    z        float32 [num_rows + 1, H]   expert outputs; the last row is zero (dead routes)
    weights  float32 [T, k]
    Returns  float32 [T, H]
    """
    y = torch.zeros((plan.num_tokens, z.shape[1]), dtype=torch.float32)
    if plan.any_dead:
        weights = torch.where(plan.positions < plan.num_rows, weights, 0.0)
    for j in range(plan.positions.shape[1]):
        y = y + weights[:, j : j + 1] * torch.index_select(z, 0, plan.positions[:, j])
    return y
