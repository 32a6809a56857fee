"""Learns the split from what it costs: two arrival times per layer-step, and the time of whole steps.

`Branch` fits fixed and per-tile cost of one side, forgetting old steps. `Controller` turns two branches
into a word between steps. `Guard` leaves hybrid when the link alone would be faster, and probes the other
mode for 8 of 512 steps so that neither choice is for ever. All times are of the device's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.core.machine import Machine
from freetoken.experts.split import BUCKETS, Split, balance, pack

KEEP = 0.75
PROBE_EVERY, PROBE_STEPS = 512, 8
LEAVE, RETURN = 1.25, 0.95
WATCH = 8


@dataclass
class Branch:
    """t = fixed + per_tile * tiles, by least squares over samples whose weight fades with every step."""

    fixed_s: float
    tile_s: float
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, tiles: int, took_s: float) -> None:
        if tiles > 0 and took_s > 0:
            added = (1.0, tiles, tiles * tiles, took_s, tiles * took_s)
            self._sums = [a + b for a, b in zip(self._sums, added, strict=True)]

    def fit(self) -> None:
        """Take the samples in, then let them fade."""
        n, x, xx, t, xt = self._sums
        if n < 0.5:
            return
        mean_x, mean_t = x / n, t / n
        spread = xx / n - mean_x * mean_x
        slope = (xt / n - mean_x * mean_t) / spread if n > 4 and spread > 0.01 * mean_x * mean_x else 0.0
        if slope > 0:
            self.tile_s = min(slope, mean_t / mean_x)
            self.fixed_s = mean_t - self.tile_s * mean_x
        else:
            self.fixed_s = min(self.fixed_s, 0.5 * mean_t)
            self.tile_s = (mean_t - self.fixed_s) / mean_x
        self._sums = [KEEP * s for s in self._sums]

    @property
    def cost(self) -> tuple[float, float]:
        return self.fixed_s, self.tile_s


def branches(machine: Machine, tile_bytes: int) -> tuple[Branch, Branch]:
    """First guess of (fill, cpu) from measured rates."""
    fill = Branch(machine.fill_fixed_s, tile_bytes / machine.link_bw)
    cpu = Branch(machine.cpu_fixed_s, tile_bytes / machine.host_bw_beside_link)
    return fill, cpu


class Controller:
    """Writes `split.words`; `observe` per layer-step, `end_step` per step."""

    def __init__(self, machine: Machine, tile_bytes: int) -> None:
        self._start = [branches(machine, tile_bytes) for _ in range(BUCKETS)]
        self._branches = [branches(machine, tile_bytes) for _ in range(BUCKETS)]
        self._touched: set[int] = set()
        fill, cpu = self._start[0]
        self.split = Split.uniform(pack(*balance(fill.cost, cpu.cost)))
        self.guard = Guard()
        self.actual_s = self.alone_s = 0.0

    def observe(self, bucket: int, fill: tuple[int, float], cpu: tuple[int, float]) -> None:
        """Note (tiles, arrival in s after the start) of both branches of one layer-step."""
        by_link, by_cpu = self._branches[bucket]
        by_link.observe(*fill)
        by_cpu.observe(*cpu)
        self._touched.add(bucket)
        self.actual_s += max(fill[1], cpu[1])
        self.alone_s += by_link.fixed_s + (fill[0] + cpu[0]) * by_link.tile_s

    def end_step(self, step_s: float) -> None:
        for bucket in self._touched:
            by_link, by_cpu = self._branches[bucket]
            by_link.fit()
            by_cpu.fit()
            self.split.words[bucket, 0] = pack(*balance(by_link.cost, by_cpu.cost))
        self._touched.clear()
        returned = self.guard.step(step_s, self.actual_s, self.alone_s)
        self.actual_s = self.alone_s = 0.0
        if returned:
            self._restart()

    def _restart(self) -> None:
        """Forget what the CPU cost before: a return to hybrid starts from the first guess."""
        for bucket, (_, cpu) in enumerate(self._start):
            self._branches[bucket] = (self._branches[bucket][0], Branch(*cpu.cost))
            self.split.words[bucket, 0] = pack(*balance(self._branches[bucket][0].cost, cpu.cost))

    def tiles_to_fill(self, missing: int, bucket: int) -> int:
        """Q of this layer-step; everything while hybrid is left (alpha = 1)."""
        if self.guard.link_only:
            return missing
        return self.split.tiles_to_fill(missing, bucket)

    def costs(self, bucket: int = 0) -> tuple[tuple[float, float], tuple[float, float]]:
        """((fixed, tile) of the fill branch, the same of the CPU branch), in seconds."""
        fill, cpu = self._branches[bucket]
        return fill.cost, cpu.cost


class Guard:
    """Which mode runs: `hybrid`, or the link alone. `left` is the choice, `link_only` includes probes."""

    def __init__(self) -> None:
        self.left = False
        self.switches = 0
        self._step = 0
        self._recent: list[float] = []
        self._probe: list[float] = []
        self._actual: list[float] = []
        self._alone: list[float] = []

    @property
    def probing(self) -> bool:
        return self._step % PROBE_EVERY >= PROBE_EVERY - PROBE_STEPS

    @property
    def link_only(self) -> bool:
        return self.left != self.probing

    def step(self, step_s: float, actual_s: float, alone_s: float) -> bool:
        """Note one step; returns True when hybrid starts anew (a probe of it, or a return to it).

        actual_s, alone_s   what its branches took, and what the link alone would have taken
        """
        was = self.link_only
        if self.probing:
            self._probe.append(step_s)
        else:
            self._recent = [*self._recent[-31:], step_s]
            if not self.left:
                self._watch(actual_s, alone_s)
        self._step += 1
        if self._probe and not self.probing:
            self._judge()
        return was and not self.link_only

    def _watch(self, actual_s: float, alone_s: float) -> None:
        """Leave at once when the last steps' branches were clearly slower than the link alone."""
        self._actual = [*self._actual[-(WATCH - 1) :], actual_s]
        self._alone = [*self._alone[-(WATCH - 1) :], alone_s]
        if len(self._actual) == WATCH and sum(self._actual) > LEAVE * sum(self._alone) > 0:
            self._switch(True)

    def _judge(self) -> None:
        probe, usual = sum(self._probe) / len(self._probe), sum(self._recent) / max(1, len(self._recent))
        self._probe = []
        if probe < RETURN * usual:
            self._switch(not self.left)

    def _switch(self, left: bool) -> None:
        self.left, self.switches = left, self.switches + 1
        self._recent, self._actual, self._alone = [], [], []
