"""The timing that `ft bench simulate` puts under a placement: one decode step or one prefill in seconds.

Owns the arithmetic of a layer on a machine: what the GPU reads, what the link brings, what the CPU reads,
and which of them overlap. Residency is the replay's, the split is the balance of two branches. Doesn't
know reports. A layer-step takes

    fixed + dense / B_gpu + max(hits s / B_gpu, a_p + Q s / B_p + late Q s / B_gpu, a_c + (M - Q) s / B_c)

with host memory shared: while the link is busy the CPU reads at the machine's rate beside it, afterwards at
its full rate. Where CPU and link share one bandwidth, every fill share up to the balance takes equally long:
the largest is taken, since fills warm the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.bench.geometries import Geometry
from freetoken.bench.replay import Ids, Residency
from freetoken.core.interfaces import Policy
from freetoken.core.machine import Machine

LAYER_FIXED_S = 35e-6
"""Launches, router, norms and combine of one layer; the figure of the measured decode graph."""
EQUAL = 1.05
"""Splits within 5 % of the fastest count as equally fast."""
GEMM_EFFICIENCY = 0.6
MODES = ("hybrid", "offload", "cpu", "static")
TILES = 16


@dataclass(frozen=True)
class Step:
    """What one decode step did. tiles count TILES an expert."""

    seconds: float
    requests: int
    misses: int
    filled_tiles: int
    cpu_tiles: int


def best_fill(machine: Machine, expert_bytes: float, misses: int, tiles: int = TILES) -> tuple[int, float]:
    """Most tiles over the link that don't delay a layer-step's misses, and the seconds they all take."""
    total = misses * tiles
    fills: NDArray[np.int64] = np.arange(total + 1, dtype=np.int64)
    seconds = branches(machine, expert_bytes / tiles, fills, total - fills)
    best = int(np.flatnonzero(seconds <= EQUAL * seconds.min())[-1])
    return best, float(seconds[best])


def branches(
    machine: Machine, tile_bytes: float, filled: NDArray[np.int64], on_cpu: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seconds until both sides have done their tiles."""
    link_bytes, cpu_bytes = filled * tile_bytes, on_cpu * tile_bytes
    link = np.where(filled > 0, machine.fill_fixed_s + link_bytes / machine.link_bw, 0.0)
    late = link_bytes / machine.gpu_bw
    beside = machine.host_bw_beside_link
    shared = np.minimum(link, cpu_bytes / beside)
    rest = np.maximum(cpu_bytes - shared * beside, 0.0) / machine.host_bw
    cpu = np.where(on_cpu > 0, machine.cpu_fixed_s + shared + rest, 0.0)
    result: NDArray[np.float64] = np.maximum(link + late, cpu)
    return result


class Plant:
    """One machine with one model under one mode, driven by routed ids."""

    def __init__(
        self, machine: Machine, geometry: Geometry, mode: str, policy: Policy, num_slots: int
    ) -> None:
        self.machine, self.geometry, self.mode = machine, geometry, mode
        self.residency = Residency(policy, geometry.pool, num_slots, geometry.token_cycle)
        self._credit = 0.0
        dense = geometry.dense_bytes / geometry.layers / machine.gpu_bw
        self._layer_s = LAYER_FIXED_S + dense
        self._plans: dict[int, tuple[int, float]] = {}

    def seed(self, ids: Ids, counts: Ids, step: int) -> None:
        """Place what a prefill used; free slots keep other experts, which streamed by anyway."""
        policy = self.residency.policy
        policy.seed(ids.tolist(), counts.tolist(), step)
        self.residency.place(policy.place(self.residency.num_slots))
        self.residency.fill_up()

    def decode(self, layers: Sequence[Ids], step: int) -> Step:
        seconds = 0.0
        requests = misses = filled_tiles = cpu_tiles = 0
        for ids in layers:
            missing = self.residency.missing(ids)
            self.residency.policy.touch(ids, step)  # type: ignore[arg-type]
            filled, missing_s = self._misses(ids, missing, step)
            hits_s = (ids.size - missing.size) * self.geometry.expert_bytes / self.machine.gpu_bw
            seconds += self._layer_s + (ids.size > 0) * max(hits_s, missing_s)
            requests += ids.size
            misses += missing.size
            filled_tiles += filled
            cpu_tiles += missing.size * TILES - filled
        return Step(seconds, requests, misses, filled_tiles, cpu_tiles)

    def _misses(self, ids: Ids, missing: Ids, step: int) -> tuple[int, float]:
        """Bring in or compute one layer's misses; returns filled tiles and seconds."""
        count = int(missing.size)
        if not count:
            return 0, 0.0
        if count not in self._plans:
            self._plans[count] = self._plan(count)
        tiles, seconds = self._plans[count]
        # A cut expert becomes resident in the background: whole experts follow the tiles' credit.
        self.residency.fill(ids, missing, step, tiles / (count * TILES))
        return tiles, seconds

    def _plan(self, count: int) -> tuple[int, float]:
        if self.mode == "hybrid":
            return best_fill(self.machine, self.geometry.expert_bytes, count)
        tiles = count * TILES if self.mode == "offload" else 0
        tile = self.geometry.expert_bytes / TILES
        seconds = branches(self.machine, tile, np.array([tiles]), np.array([count * TILES - tiles]))
        return tiles, float(seconds[0])


def prefill_seconds(
    machine: Machine, geometry: Geometry, tokens: int, resident_share: float, *, overlap: bool
) -> float:
    """Seconds of a layer-major prefill: each layer's absent experts cross the link once.

    With overlap, the next layer's copies run while this one computes; without, one after the other.
    """
    reached = 1.0 - (1.0 - geometry.top_k / geometry.experts) ** tokens
    absent = geometry.experts * reached * (1.0 - resident_share)
    link_s = absent * geometry.expert_bytes / machine.link_bw
    routed = 6.0 * geometry.hidden * geometry.width * geometry.top_k * tokens
    dense = 2.0 * geometry.dense_params / geometry.layers * tokens
    read_s = (
        geometry.experts * reached * geometry.expert_bytes + geometry.dense_bytes / geometry.layers
    ) / machine.gpu_bw
    compute_s = LAYER_FIXED_S + max((routed + dense) / (machine.gpu_flops * GEMM_EFFICIENCY), read_s)
    if not overlap:
        return geometry.layers * (link_s + compute_s)
    arrived = done = 0.0
    for _ in range(geometry.layers):
        arrived += link_s
        done = max(done, arrived) + compute_s
    return done
