"""One MoE layer-step in flight, and what pieces of it cost. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.experts.record import RecordLayout
from freetoken.experts.rows import Ints, RowPlan


@dataclass
class LayerWork:
    """x [T + 1, H] with a zero row last; z float32 [num_rows + 1, H], the experts' running sums."""

    layer: int
    layout: RecordLayout
    plan: RowPlan
    x: Tensor
    z: Tensor
    weights: Tensor

    def cost(self, members: Ints, tiles: int) -> tuple[float, float]:
        """(bytes, flops) of `tiles` tiles of each of the plan's experts `members`."""
        one = self.layout
        rows = int(self.plan.counts[members].sum())
        flops = 6.0 * one.hidden * one.tile_width * tiles * rows
        return float(len(members) * tiles * one.tile_bytes), flops
