"""Formats whose weight is a level times a step: weight = levels[code] * step - least.

A step, and a least where the format has one, cover `group` elements of a row. Subclasses say how their
parts make both, and how parts are chosen for wanted ones; everything else is here, once.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix
from freetoken.quant._coded import CodedFormat, blocks_of, spread


class LevelFormat(CodedFormat):
    """levels ascend by code; without a least, the first one has the largest magnitude.

    affine   the format has a least
    """

    levels: tuple[int, ...]
    group = 32
    affine = False

    @abc.abstractmethod
    def steps(self, coded: CodedMatrix) -> tuple[Tensor, Tensor | None]:
        """float32 [.., rows, K / group]: step and least."""

    @abc.abstractmethod
    def fit(self, step: Tensor, least: Tensor) -> dict[str, Tensor]:
        """Parts whose steps are near these, float32 [.., rows, K / group]."""

    def decode(self, coded: CodedMatrix) -> Tensor:
        step, least = self.steps(coded)
        weights = torch.tensor(self.levels, dtype=torch.float32)[coded["codes"].int()]
        weights *= spread(step, weights, self.group)
        return weights if least is None else weights - spread(least, weights, self.group)

    def encode(self, matrix: Tensor) -> CodedMatrix:
        blocks = blocks_of(matrix, self.group)
        if self.affine:
            least = -blocks.amin(-1).clamp(max=0)  # zero is in the range: most formats have no least below it
            step = (blocks.amax(-1).clamp(min=0) + least) / self.levels[-1]
        else:
            largest = blocks.abs().argmax(-1, keepdim=True)
            step, least = blocks.gather(-1, largest).squeeze(-1) / self.levels[0], torch.zeros(())
        parts = self.fit(step, least)
        step, low = self.steps(parts)
        wanted = blocks if low is None else blocks + low[..., None]
        wanted = (wanted / torch.where(step == 0, 1.0, step)[..., None]).contiguous()
        levels = torch.tensor(self.levels, dtype=torch.float32)
        codes = torch.bucketize(wanted, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        return {"codes": codes.flatten(-2), **parts}


def factors(values: Tensor, per: int, most: int) -> tuple[Tensor, Tensor]:
    """Split float [.., n] into float16 [.., n / per] and integers [.., n] of magnitude <= most."""
    d = (blocks_of(values, per).abs().amax(-1) / most).to(torch.float16)
    step = spread(d.float(), values, per)
    return d, (values / torch.where(step > 0, step, 1.0)).round().clamp(-most, most)


def product(d: Tensor, factor: Tensor, per: int) -> Tensor:
    """float32 [.., n]: the inverse."""
    return spread(d.float(), factor, per) * factor.float()
