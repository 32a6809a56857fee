"""A run of expert tiles over some rows: partial outputs, one for each tile.

    expert_mlp(x, gate, up, down_t, activation, bias=None, exact=False)
        x        16-bit or float32 [R, H], or [n, R, H] where each tile has rows of its own
        gate     [n, w, H]   up [n, w, H]   down_t [n, w, H]   any float type, contiguous best
        bias     float32 [n, 2, w]: of gate and up; down's is the caller's, once an expert
        Returns  float32 [n, R, H]: down_t^T (act(gate x) * up x) of each tile

Rounding points: gate and up in float32, `act(g) * u` rounded once to x's 16-bit type (not at all if x
is float32), down in float32. A tile's result is the same bits whatever other tiles are in the call.
exact: float32 throughout and a row's result depends on that row alone. Mutates nothing, never syncs.
The sum over an expert's tiles is the caller's, in ascending order: `sum_tiles`.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.core.model_config import Activation
from freetoken.kernels._choose import choose
from freetoken.kernels.expert_mlp import reference

MAKERS = (reference,)


def expert_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down_t: Tensor,
    activation: Activation = Activation(),  # noqa: B008 - frozen
    bias: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    maker = choose(MAKERS, gate.device.type)
    run = maker.expert_mlp_exact if exact else maker.expert_mlp
    out: Tensor = run(x, gate, up, down_t, activation, bias)
    return out


def sum_tiles(partials: Tensor) -> Tensor:
    """float32 [n, R, H] -> [R, H], added one by one in ascending tile order."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total
