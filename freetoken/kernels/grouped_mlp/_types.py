"""What the operation is told about records and routes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from freetoken.core.model_config import Activation


@dataclass(frozen=True)
class Form:
    """A record of uncoded weights; sizes in bytes, as experts.record lays it out.

    A tile is gate [w, H], up [w, H], down transposed [w, H], then, at bias_offset, float32 biases of gate
    and up [2, w]; the record begins with down's bias float32 [H]. bias_offset 0: no biases.
    """

    hidden: int
    expert_size: int
    tile_width: int
    tile_bytes: int
    tiles_offset: int
    bias_offset: int = 0
    activation: Activation = field(default_factory=Activation)


@dataclass(frozen=True)
class Routes:
    """Routes t * k + j sorted by expert, each expert's from a multiple of `block` on.

    ids     int32 [T, k]
    order   int32 [P]        the route at a place, -1 = none
    place   int32 [T * k]    the place of a route (undefined for dead ones)
    first   int32 [E + 1]    an expert's first block; first[E] blocks in all
    owner   int32 [P/block]  the expert of a block that is used
    """

    ids: Tensor
    order: Tensor
    place: Tensor
    first: Tensor
    owner: Tensor
    block: int
    num_experts: int
