"""The plainest expert backend: loop over experts in ascending id, straight from their matrices."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from freetoken.core.batch import Batch
from freetoken.core.expert_stats import ExpertStats
from freetoken.core.interfaces import Biases, ExpertBackend, ExpertSink, Routing
from freetoken.core.model_config import Activation
from freetoken.kernels.expert_mlp import expert_mlp, sum_tiles


class ReferenceExperts(ExpertBackend, ExpertSink):
    """Keeps matrices as given and computes them in `num_tiles` equal tiles."""

    name = "reference"

    def __init__(
        self, *, exact: bool = False, activation: Activation | None = None, num_tiles: int = 4
    ) -> None:
        self.exact, self.activation, self.num_tiles = exact, activation or Activation(), num_tiles
        self.stats = ExpertStats()
        self.matrices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.biases: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.routed: list[tuple[int, Routing]] = []
        self._out: Tensor | None = None

    def put(
        self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor, biases: Biases | None = None
    ) -> None:
        tiled = (m.reshape(self.num_tiles, -1, m.shape[-1]) for m in (gate, up, down.t().contiguous()))
        self.matrices[layer, expert] = tuple(m.clone(memory_format=torch.contiguous_format) for m in tiled)
        if biases is not None:
            both = torch.stack([bias.float().reshape(self.num_tiles, -1) for bias in biases[:2]], 1)
            self.biases[layer, expert] = both, biases[2].float()

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch) -> None:
        self.routed.append((layer, routing))
        self._out = self.compute(layer, x, routing)

    def finish(self, layer: int) -> Tensor:
        assert self._out is not None
        return self._out

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        yield
        return self.compute(layer, x, routing)

    def compute(self, layer: int, x: Tensor, routing: Routing) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(routing.ids.flatten().tolist()) - {-1}):
            rows, at = torch.where(routing.ids == expert)
            both, last = self.biases.get((layer, expert), (None, torch.zeros(())))
            tiles = self.matrices[layer, expert]
            partials = expert_mlp(x[rows], *tiles, self.activation, both, exact=self.exact)
            out[rows] += (sum_tiles(partials) + last) * routing.weights[rows, at, None]
        return out
