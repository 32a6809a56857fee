"""Who computes a token: the router, and the shared expert beside the routed ones.

Routing is deterministic: equal probabilities go to the lowest expert id. Ids ascend within a row so
that routes are reduced in one order everywhere (equality rule). Dead rows route to -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.interfaces import Routing
from freetoken.kernels.activation import sigmoid
from freetoken.kernels.linear import linear, linear_exact
from freetoken.layers.mlp import GatedMLP


class Router:
    """Softmax router in float32: weight [E, H]; `normalise` makes the chosen weights sum to one."""

    def __init__(self, weight: Tensor, top_k: int, normalise: bool, *, exact: bool = False) -> None:
        self.weight = weight.float().contiguous()
        self.top_k = top_k
        self.normalise = normalise
        self.exact = exact

    def __call__(self, x: Tensor, live: Tensor) -> Routing:
        """Route x [T, H]; live bool [T]."""
        logits = (linear_exact if self.exact else linear)(x.float(), self.weight)
        probs, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
        weights = probs[:, : self.top_k]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        ids, at = order[:, : self.top_k].sort(dim=-1)
        ids = torch.where(live[:, None], ids, -1).to(torch.int32)
        weights = torch.where(live[:, None], weights.gather(1, at), 0.0)
        return Routing(ids, weights)


class SharedExpert:
    """The expert every token visits, weighed by sigmoid(gate x).

    The gate is the last output of the joined gate_up projection, [2 I + 1, H].
    """

    def __init__(self, mlp: GatedMLP) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> float32 [T, H]."""
        products = self.mlp.gate_up(x)
        share = sigmoid(products[:, -1:])
        return self.mlp.finish(products, x).float() * share
