"""The arithmetic of routed experts, tile by tile, in the order that the equality rule fixes.

`TileMath` computes; `ShapeMath` touches no tensor: it stands in where only control code and time matter.
Neither knows where records lie or who asks. Invariant: a tile's partial has the same bits whatever it is
batched with (every product is [block, H] x [H, w]), and tiles are added in ascending order.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from freetoken.core.errors import ConfigError
from freetoken.core.interfaces import Numerics
from freetoken.core.model_config import Activation
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import RecordLayout
from freetoken.experts.rows import Group, Ints, RowPlan, accumulate_routes, reduce_routes
from freetoken.kernels.activation import NAMES
from freetoken.kernels.expert_mlp import expert_mlp

_MAX_ELEMENTS = 1 << 24
_NOTHING = torch.empty(0, device="meta")


def pieces(group: Group, layout: RecordLayout, tiles: int) -> tuple[int, int]:
    """How many experts and tiles of a group to compute at once, so that temporaries stay small.

    A piece's size never changes a bit: products are per tile, sums go on in tile order.
    """
    each = max(group.padded, 3 * layout.tile_width) * layout.hidden
    if each * tiles <= _MAX_ELEMENTS:
        return max(1, _MAX_ELEMENTS // (each * tiles)), tiles
    return 1, max(1, _MAX_ELEMENTS // each)


class ExpertMath(abc.ABC):
    """How the tiles of records turn into outputs.

    x        [T + 1, H]                    from gather_rows: the layer's input and a zero row
    group    n experts of M rows
    records  uint8 [n, record_bytes]       from gather_records
    z        float32 [num_rows + 1, H]     running sums of all experts; the last row is zero
    """

    exact = False
    computes = True

    @abc.abstractmethod
    def gather_rows(self, x: Tensor) -> Tensor:
        """[T + 1, H] in x's dtype with a zero row at the end, which `Group.rows` names for padding."""

    @abc.abstractmethod
    def gather_records(self, view: Tensor, index: Ints) -> Tensor:
        """Rows `index` of a uint8 [units, bytes] view."""

    @abc.abstractmethod
    def output(self, num_rows: int, hidden: int) -> Tensor:
        """A new z."""

    @abc.abstractmethod
    def partials(self, layer: int, x: Tensor, group: Group, records: Tensor, first: int, last: int) -> Tensor:
        """float32 [t, n, M, H]: tiles [first, last) of each expert."""

    @abc.abstractmethod
    def add(self, z: Tensor, group: Group, places: Ints | None, partials: Tensor, first: int) -> None:
        """Add partials of experts `places` of the group (None = all) in tile order; tile 0 starts a sum."""

    @abc.abstractmethod
    def reduce(self, z: Tensor, plan: RowPlan, weights: Tensor) -> Tensor:
        """float32 [T, H]: the weighted sum over routes in ascending expert id."""

    @abc.abstractmethod
    def start_sum(self, plan: RowPlan, hidden: int) -> Tensor:
        """float32 [T, H] of zeros, for `accumulate`."""

    @abc.abstractmethod
    def accumulate(self, y: Tensor, z: Tensor, plan: RowPlan, members: Ints, weights: Tensor) -> None:
        """Add the weighted outputs of some of the plan's experts, ascending, to y."""


class TileMath(ExpertMath):
    """Real arithmetic over records of a bank's layouts."""

    def __init__(self, bank: ExpertBank, activation: Activation, numerics: Numerics) -> None:
        if activation.name not in NAMES:
            raise ConfigError(
                f"Experts with activation {activation.name!r} are not known; there are {', '.join(NAMES)}.",
                code="unknown_activation",
                hint="Choose a checkpoint with one of these.",
            )
        self._bank, self._activation = bank, activation
        self.exact = numerics.exact

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x.float() if self.exact else x, x.new_zeros((1, x.shape[1]))])

    def gather_records(self, view: Tensor, index: Ints) -> Tensor:
        return torch.index_select(view, 0, torch.from_numpy(index))

    def output(self, num_rows: int, hidden: int) -> Tensor:
        return torch.zeros((num_rows + 1, hidden))

    def partials(self, layer: int, x: Tensor, group: Group, records: Tensor, first: int, last: int) -> Tensor:
        one = self._bank.layouts[layer]
        n, m, b, t = records.shape[0], group.padded, group.block, last - first
        w, h, blocks = one.tile_width, one.hidden, group.padded // group.block
        start = one.tiles_offset + first * one.tile_bytes
        tiles = records[:, start : start + t * one.tile_bytes].unflatten(1, (t, one.tile_bytes))
        coded = self._bank.formats[layer].tile_weights(tiles[..., : one.code_bytes], w, h)
        parts = [p.float() for p in coded]
        if one.biased:
            biases = tiles[..., one.bias_offset : one.bias_offset + 8 * w].view(torch.float32)
            parts.append(biases.unflatten(-1, (2, w)))
        rows = torch.index_select(x, 0, group.rows.flatten()).view(n * blocks, b, h)
        out = torch.empty((n * blocks, t, b, h))
        owner = torch.arange(n * blocks) // blocks
        step = max(1, _MAX_ELEMENTS // (t * max(b, w) * h))
        for i in range(0, n * blocks, step):
            some = rows[i : i + step]
            weights = parts if step >= n == n * blocks else [p[owner[i : i + step]] for p in parts]
            flat = [p.flatten(0, 1) for p in weights]
            each = some.unsqueeze(1).expand(-1, t, -1, -1).reshape(-1, b, h)
            out[i : i + step] = self._mlp(each, flat).view(-1, t, b, h)
        out = out.view(n, blocks, t, b, h)
        if one.biased and first == 0:
            out[:, :, 0] += records[:, : 4 * h].view(torch.float32)[:, None, None]
        return out.permute(2, 0, 1, 3, 4).reshape(t, n, m, h)

    def _mlp(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        """parts: gate, up, down_t [n, w, H] and perhaps biases [n, 2, w]."""
        return expert_mlp(x, parts[0], parts[1], parts[2], self._activation, *parts[3:])

    def add(self, z: Tensor, group: Group, places: Ints | None, partials: Tensor, first: int) -> None:
        slab = group.slab(z)
        some = slab if places is None else slab[torch.from_numpy(places)]
        sum_into(some, partials, first)
        if places is not None:
            slab[torch.from_numpy(places)] = some

    def reduce(self, z: Tensor, plan: RowPlan, weights: Tensor) -> Tensor:
        return reduce_routes(z, plan, weights)

    def start_sum(self, plan: RowPlan, hidden: int) -> Tensor:
        return torch.zeros((plan.num_tokens, hidden))

    def accumulate(self, y: Tensor, z: Tensor, plan: RowPlan, members: Ints, weights: Tensor) -> None:
        accumulate_routes(y, z, plan, members, weights)


def sum_into(total: Tensor, partials: Tensor, first: int) -> None:
    """total += partials[0], then partials[1], ...; a run from tile 0 starts the sum."""
    for tile in range(partials.shape[0]):
        if first == 0 and tile == 0:
            total.copy_(partials[0])
        else:
            total.add_(partials[tile])


class ShapeMath(ExpertMath):
    """No arithmetic: tensors pass through untouched. Costs are charged by whoever calls."""

    computes = False

    def gather_rows(self, x: Tensor) -> Tensor:
        return x

    def gather_records(self, view: Tensor, index: Ints) -> Tensor:
        return view

    def output(self, num_rows: int, hidden: int) -> Tensor:
        return _NOTHING

    def partials(self, layer: int, x: Tensor, group: Group, records: Tensor, first: int, last: int) -> Tensor:
        return _NOTHING

    def add(self, z: Tensor, group: Group, places: Ints | None, partials: Tensor, first: int) -> None:
        """Nothing to add."""

    def reduce(self, z: Tensor, plan: RowPlan, weights: Tensor) -> Tensor:
        return _NOTHING

    def start_sum(self, plan: RowPlan, hidden: int) -> Tensor:
        return _NOTHING

    def accumulate(self, y: Tensor, z: Tensor, plan: RowPlan, members: Ints, weights: Tensor) -> None:
        """Nothing to add."""
