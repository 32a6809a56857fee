"""Who computes a token: the router, and the shared expert beside the routed ones.

Routing is deterministic: equal probabilities go to the lowest expert id. Ids ascend within a row so
that routes are reduced in one order everywhere (equality rule). Dead rows route to -1.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.core.interfaces import Routing
from freetoken.kernels.linear import linear_exact
from freetoken.kernels.router import choose_experts, route
from freetoken.layers.mlp import GatedMLP
from freetoken.layers.norm import RMSNorm


class Router:
    """Norm, then softmax router in float32: weight [E, H], bias float32 [E] or None.

    normalise   the weights sum to one
    """

    def __init__(
        self,
        norm: RMSNorm,
        weight: Tensor,
        top_k: int,
        normalise: bool,
        *,
        bias: Tensor | None = None,
        exact: bool = False,
    ) -> None:
        self.norm = norm
        self.weight, self.bias = weight.float().contiguous(), bias
        self.top_k = top_k
        self.normalise = normalise
        self.exact = exact

    def __call__(self, h: Tensor, live: Tensor) -> tuple[Tensor, Routing]:
        """The normed x [T, H] of h [T, H], and where its rows go; live bool [T]."""
        norm = self.norm
        if self.exact:
            x = norm(h)
            logits = linear_exact(x.float(), self.weight, self.bias)
            return x, Routing(*choose_experts(logits, self.top_k, self.normalise, live))
        how = (self.top_k, self.normalise, live, self.bias)
        x, ids, weights = route(h, norm.weight, norm.eps, self.weight, *how)
        return x, Routing(ids, weights)


class SharedExpert:
    """The expert every token visits, weighed by sigmoid(gate x).

    The gate is the last output of the joined gate_up projection, [2 I + 1, H].
    """

    def __init__(self, mlp: GatedMLP) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> [T, H] and its gate [T, 1], before the sigmoid: `add_routed` weighs."""
        products = self.mlp.gate_up(x)
        return self.mlp.finish(products), products[:, -1:]
