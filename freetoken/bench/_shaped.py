"""Runs the real control code of experts/ at a published geometry: slots, split, ring, on a virtual clock.

Owns the step from a trace to that code and what is read off its counters. No weights, no tokens: bank and
slots are phantoms. Doesn't know reports or memory plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.bench._columns import make_policy
from freetoken.bench.geometries import Geometry
from freetoken.bench.traces import DECODE, NO_ROUTING, PREFILL, Trace
from freetoken.core import choices
from freetoken.core.machine import Machine
from freetoken.devices.sim import SimDevice
from freetoken.experts.backends._resident import ResidentBackend
from freetoken.experts.shape_only import Shape, ShapeOnly

BACKENDS = "freetoken.experts.backends"
MODES = ("hybrid", "offload", "cpu", "static")
LAYER_FIXED_S = 35e-6
"""Launches, router, norms and combine of one layer; the figure of a measured decode graph."""
TILES = 16
WARM_SHARE = 3
"""One warm step for this many timed ones."""
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Decoded:
    """Timed decode steps and what their misses became. tiles count TILES an expert."""

    steps: int
    seconds: float
    requests: int
    misses: int
    missing_tiles: int
    filled_tiles: int
    cpu_tiles: int


def open_model(
    machine: Machine, geometry: Geometry, mode: str, *, num_slots: int, policy: str, overlap: bool = True
) -> ShapeOnly:
    """Build a mode: hybrid, offload, cpu, or static (placed by the prompt, misses on the CPU).

    Where the whole pool has slots, it is loaded before anything runs.
    """
    backend = {"static": "hybrid"}.get(mode, mode)
    name = {"static": "static_prefill"}.get(mode, policy)
    options: dict[str, Any] = {"static": True} if mode == "static" else {}
    shape = Shape(
        geometry.layers,
        geometry.experts,
        geometry.top_k,
        geometry.hidden,
        geometry.width,
        geometry.expert_bytes,
        num_tiles=TILES,
        dense_bytes=geometry.dense_bytes,
        dense_params=geometry.dense_params,
        layer_fixed_s=LAYER_FIXED_S,
    )
    model = ShapeOnly(
        shape,
        SimDevice(machine, phantom=True),
        make=choices.load(BACKENDS, backend).create,
        policy=make_policy(name),
        num_slots=0 if mode == "cpu" else num_slots,
        overlap=overlap,
        **options,
    )
    if num_slots >= geometry.pool and isinstance(model.backend, ResidentBackend):
        model.backend.preload(list(range(geometry.pool)))
    return model


def decode(model: ShapeOnly, trace: Trace, steps: int) -> Decoded:
    """Run a trace from its start; time `steps` decode steps after a third as many warm ones."""
    warm, seconds, done = steps // WARM_SHARE, 0.0, 0
    before = (0, 0, 0, 0, 0)
    for phase, ids in passes(trace):
        if phase == PREFILL:
            model.prefill(ids.shape[1], lambda layer, ids=ids: ids[layer])  # type: ignore[misc]
            continue
        if done == warm:
            before = _counters(model)
        took = model.step(ids)
        done += 1
        seconds += took if done > warm else 0.0
        if done == warm + steps:
            break
    found = [now - then for then, now in zip(before, _counters(model), strict=True)]
    return Decoded(max(0, done - warm), seconds, *found)


def prefill(model: ShapeOnly, trace: Trace, tokens: int) -> float:
    """Seconds of a prompt of `tokens`, routed as the trace's tokens repeated."""
    ids = _ids(trace)
    rows = np.arange(tokens) % len(ids)
    return model.prefill(tokens, lambda layer: ids[rows, layer])


def _counters(model: ShapeOnly) -> tuple[int, int, int, int, int]:
    s = model.stats
    return s.requests, s.misses, s.missing_tiles, s.filled_tiles, s.cpu_tiles


def passes(trace: Trace) -> Iterator[tuple[int, Ids]]:
    """(phase, int32 [L, T, k]) of each decode step and each prefill."""
    ids = _ids(trace)
    for phase, rows in trace.engine_steps():
        if phase in (PREFILL, DECODE):
            yield phase, np.ascontiguousarray(ids[rows].transpose(1, 0, 2))


def _ids(trace: Trace) -> Ids:
    """int32 [N, L, k], -1 where there is no routing."""
    ids: Ids = trace.topk.astype(np.int32)
    ids[trace.topk == NO_ROUTING[trace.topk.dtype.itemsize]] = -1
    return ids
