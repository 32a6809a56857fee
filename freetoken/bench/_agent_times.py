"""Times of agents' turns on a machine that is not here: a published model's shapes on a virtual clock.

Runs the control code of experts (`_shaped`) at a few prefill lengths, once, and draws lines between them.
Knows no agent. All figures are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from freetoken.bench import _shaped, synthetic
from freetoken.bench._agent_runs import Turn
from freetoken.bench.geometries import Geometry, geometry
from freetoken.bench.simulate import fit_model
from freetoken.bench.traces import PREFILL, Trace
from freetoken.core.errors import ConfigError
from freetoken.core.machine import preset

GEOMETRY = "qwen3.6-35b-a3b"
LENGTHS = (64, 512, 4096)
STEPS = 12
"""Decode steps behind each prefill: the ones in which its traces show."""


class Times:
    """machine: a preset's name. single_tok_s: decode speed late in one long turn."""

    def __init__(self, machine: str, model: Geometry | None = None) -> None:
        model = model or geometry(GEOMETRY)
        fit = fit_model(preset(machine), model)
        if fit.why:
            raise ConfigError(f"{machine} can't hold {model.name}: {fit.why}.", code="invalid_option")
        self._machine, self._fit = machine, fit
        self._points: list[tuple[float, float]] = []
        self._single = 0.0

    @property
    def single_tok_s(self) -> float:
        self._measure()
        return self._single

    def of(self, turns: Sequence[Turn]) -> list[tuple[float, float]]:
        """(TTFT in seconds, decode tokens/s) of each turn, by what it computes."""
        self._measure()
        lengths = [t.computed for t in turns]
        first, rates = (np.interp(lengths, LENGTHS, [p[i] for p in self._points]) for i in (0, 1))
        beyond = np.maximum(np.array(lengths) / LENGTHS[-1], 1.0)
        return list(zip((first * beyond).tolist(), rates.tolist(), strict=True))

    def _measure(self) -> None:
        if self._points:
            return
        g = self._fit.geometry
        model = _shaped.open_model(
            preset(self._machine), g, "hybrid", num_slots=self._fit.num_slots, policy="two_speed"
        )
        trace = synthetic.cached(synthetic.shape(g.shape))
        steps = _steps(trace)

        def decode(count: int) -> float:
            return count / sum(model.step(next(steps)) for _ in range(count))

        _shaped.prefill(model, trace, LENGTHS[-1])
        decode(3 * STEPS)
        self._single = decode(3 * STEPS)
        self._points = [(_shaped.prefill(model, trace, n), decode(STEPS)) for n in LENGTHS]


def _steps(trace: Trace) -> Iterator[Any]:
    """The trace's decode steps, over and over."""
    while True:
        for phase, ids in _shaped.passes(trace):
            if phase != PREFILL:
                yield ids
