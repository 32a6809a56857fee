"""Taking codes apart as the tools pack them: nibbles of bytes and fields of 32-bit words, lowest first."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.weights.dialect import Unreadable


def nibbles(packed: Tensor) -> Tensor:
    """uint8 [.., n], low nibble first -> codes uint8 [.., 2 n]."""
    wide = packed.to(torch.int16)  # two codes at once, where the low byte of a word lies first
    return ((wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F)).view(torch.uint8)


def fields(words: Tensor, bits: int, axis: int) -> Tensor:
    """int32 words -> uint8 fields of `bits`, lowest first, along `axis` of a matrix."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = (1 << bits) - 1
    parts = (words.unsqueeze(-1) >> shifts) & mask
    if axis in (-1, words.dim() - 1):
        return parts.flatten(-2).to(torch.uint8)
    return parts.movedim(-1, axis + 1).flatten(axis, axis + 1).to(torch.uint8)


def scalar(value: Tensor) -> Tensor:
    """A one-element tensor of any shape -> float32 [1, 1]."""
    return value.float().reshape(1, 1)


def one(shape: tuple[int, ...]) -> bool:
    """True for the shape of a single number: [], [1], [1, 1]."""
    return all(n == 1 for n in shape)


def same(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Unreadable unless a part has the shape that the codes ask for."""
    if tuple(found) != tuple(wanted):
        raise Unreadable(f"{what} has shape {list(found)}, its codes ask for {list(wanted)}")
