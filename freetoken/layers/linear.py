"""A weight matrix and the way it is applied: plain numbers, a format's codes, or several one after the other.

Invariant: the same object gives the same rounding for every batch; `exact` makes rows independent.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from freetoken.core.weights import CodedWeight
from freetoken.kernels.coded_linear import coded_linear
from freetoken.kernels.gating import add_routed, widen
from freetoken.kernels.linear import linear, linear_add, linear_exact, place
from freetoken.kernels.norm_linear import norm_linear
from freetoken.layers.norm import RMSNorm

FEW_ROWS = 16
MANY_OUTPUTS = 1 << 15
"""A vocabulary: asked for a few rows at a time, and perhaps shared with the embedding."""


def placed(weight: Tensor | CodedWeight) -> Tensor | CodedWeight:
    """The weight where products read it fastest. Placing it again gives itself: what shares it, like a tied
    embedding, takes the placed one, and there is one copy."""
    if isinstance(weight, CodedWeight):
        return replace(weight, packed=place(weight.packed))
    return place(weight.contiguous())


class Product(abc.ABC):
    """y = x W^T + b for x [T, K]; W [N, K].

    shape   (N, K)
    """

    shape: tuple[int, int]

    @abc.abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, N]."""

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The product of the normed x."""
        return self(norm(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product."""
        return residual + self(x)


class Linear(Product):
    """Weight [N, K] and bias [N] as numbers of the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._whole = place(_to_eights(weight.contiguous()))
        padded = self._whole.shape[0] > self.shape[0]
        self.weight = self._whole[: self.shape[0]] if padded else self._whole
        self.bias = bias
        self.exact = exact

    def __call__(self, x: Tensor) -> Tensor:
        if self.exact:
            return linear_exact(x, self.weight, self.bias)
        if self._whole is not self.weight and self.bias is None and x.shape[:-1].numel() > FEW_ROWS:
            return linear(x, self._whole)[..., : self.shape[0]]
        return linear(x, self.weight, self.bias)

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if self.exact:
            return linear_exact(norm(x), self.weight, self.bias)
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.exact:
            return residual + linear_exact(x, self.weight, self.bias)
        return linear_add(x, self.weight, self.bias, residual)


def _to_eights(weight: Tensor) -> Tensor:
    """On a card, rows of zeros up to a multiple of eight: where rows of the output don't start at 16 bytes,
    cuBLAS takes a kernel of years ago for many rows (a shared expert with its gate: 1,025 outputs)."""
    rows = weight.shape[0]
    if weight.device.type != "cuda" or rows % 8 == 0 or rows >= MANY_OUTPUTS:
        return weight
    return torch.nn.functional.pad(weight, (0, 0, 0, -rows % 8))


class CodedLinear(Product):
    """Weight as a format's codes, bias [N] in numbers of the compute dtype; `int8`: activations are bytes."""

    def __init__(self, weight: CodedWeight, bias: Tensor | None = None, *, int8: bool = False) -> None:
        self.weight = replace(weight, packed=place(weight.packed))
        self.bias, self.shape, self.int8 = bias, weight.shape, int8

    def __call__(self, x: Tensor) -> Tensor:
        return coded_linear(x, self.weight, self.bias, int8=self.int8)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() > FEW_ROWS:
            return residual + self(x)
        return add_routed(residual, widen(self(x)), None)  # the same sum, by operations of a recorded step


class Stacked(Product):
    """Several products of one input, their outputs side by side."""

    def __init__(self, parts: Sequence[Product]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def stack(
    weights: Sequence[Tensor | CodedWeight],
    biases: Sequence[Tensor | None],
    *,
    exact: bool = False,
    int8: bool = False,
) -> Product:
    """Projections of one input as one product. int8: inputs of coded ones become bytes."""
    parts: list[Product] = []
    for weight, bias in zip(weights, biases, strict=True):
        if isinstance(weight, CodedWeight):
            parts.append(CodedLinear(weight, bias, int8=int8))
        else:
            parts.append(Linear(weight, bias, exact=exact))
    return parts[0] if len(parts) == 1 else Stacked(parts)
