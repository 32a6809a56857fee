"""The host's answer to a device that rings: the native executor behind a thread that watches a word.

Owns thread and handles. Only exists where the native library can compute every layer. `wake` is called by
whoever launches steps: the device can't wake a sleeping thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from freetoken.experts import device_io
from freetoken.experts.native_executor import native_layers
from freetoken.experts.setup import ExpertSetup
from freetoken.kernels.expert_step import Io
from freetoken.native.library import library

DEADLINE_MS = 900
"""Less than the device's own deadline, so that the host says first what went wrong."""


ROW_UNITS = 12
"""Parts of a tile's cost that native/poller.h counts in: a tile of one row is 12, another row one more."""


def row_factor(rows: float) -> float:
    """What a tile of `rows` rows costs the host, in tiles of one row (16-bit experts, 8 rows: 1.4 to 1.8)."""
    return (ROW_UNITS - 1 + rows) / ROW_UNITS


class Answers(NamedTuple):
    """Sums over answers of the host: seconds, tiles, how many, tiles^2, tiles x seconds.

    Tiles are those of one row: one of more rows counts as `row_factor` of it.
    """

    seconds: float = 0.0
    tiles: float = 0.0
    requests: int = 0
    squares: float = 0.0
    products: float = 0.0

    def since(self, before: Answers) -> Answers:
        return Answers(*(b - a for a, b in zip(before, self, strict=True)))

    def line(self) -> tuple[float, float]:
        """(seconds of an answer beside its tiles, seconds of a tile): least squares, both within reason.

        What an answer takes beside tiles is waking up, and that the last worker ends alone: it falls as tiles
        become many, so a tile costs at least a third of the mean.
        """
        mean_tiles, mean = self.tiles / self.requests, self.seconds / self.requests
        spread = self.squares / self.requests - mean_tiles**2
        slope = mean / mean_tiles
        if spread > 0.5:
            fitted = (self.products / self.requests - mean * mean_tiles) / spread
            slope = min(slope, max(fitted, slope / 3))
        return mean - slope * mean_tiles, slope


class Poller:
    def __init__(self, setup: ExpertSetup, io: Io, max_rows: int, top_k: int) -> None:
        lib, layers = library(), native_layers(setup)
        assert lib is not None and layers
        self._lib, self._io = lib, io
        self.threads = max(1, setup.threads)
        lib.start(self.threads)
        self._executor = lib.new_executor(layers)
        block = device_io.describe(io, max_rows, top_k, DEADLINE_MS)
        self._poller = lib.new_poller(self._executor, block)

    def wake(self) -> None:
        self._lib.wake_poller(self._poller)

    def rest(self, *, everything: bool = False) -> None:
        """A step, or all that were in flight, are over."""
        self._lib.rest_poller(self._poller, everything)

    def limit(self, threads: int) -> None:
        """Let at most so many threads answer."""
        self._lib.limit(threads)

    def totals(self) -> Answers:
        """Sums over all answers so far."""
        ns, tiles, requests, squares, both = self._io.reply[4:14].view(torch.int64).tolist()
        unit = 1 / ROW_UNITS
        return Answers(ns * 1e-9, unit * tiles, requests, unit * unit * squares, unit * both * 1e-9)

    def close(self) -> None:
        poller, self._poller = self._poller, 0
        if poller:
            self._lib.free_poller(poller)
            self._lib.free_executor(self._executor)


def can_compute(setup: ExpertSetup) -> bool:
    """Whether the native library reads every layer of the bank."""
    return bool(native_layers(setup))
