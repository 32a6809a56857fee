"""A weight matrix and the way it is applied.

Invariant: the same object gives the same rounding for every batch; `exact` makes rows independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.kernels.linear import linear, linear_add, linear_exact, place
from freetoken.kernels.norm_linear import norm_linear
from freetoken.layers.norm import RMSNorm


class Linear:
    """y = x W^T + b for x [T, K]; weight [N, K] and bias [N] of the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> None:
        self.weight = place(weight.contiguous())
        self.bias = bias
        self.exact = exact

    @classmethod
    def join(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, *, exact: bool = False
    ) -> Linear:
        """Stack several projections of one input: one product instead of many."""
        return cls(torch.cat(list(weights)), torch.cat(list(biases)) if biases else None, exact=exact)

    def __call__(self, x: Tensor) -> Tensor:
        return (linear_exact if self.exact else linear)(x, self.weight, self.bias)

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The product of the normed x."""
        if self.exact:
            return linear_exact(norm(x), self.weight, self.bias)
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product."""
        if self.exact:
            return residual + linear_exact(x, self.weight, self.bias)
        return linear_add(x, self.weight, self.bias, residual)
