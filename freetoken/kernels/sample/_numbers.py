"""What all kernels of `sample` share: words of a choice, logits as numbers that can be ranked and weighed."""

from __future__ import annotations

from freetoken.kernels._triton import constexpr, jit, tl
from freetoken.kernels.sample._types import ASKED

MOST_KEPT, NOTHING = constexpr(64), constexpr(-(1 << 31))
# Kinds: the largest, one of all, one of up to MOST_KEPT, one of any limited number, an id that is given.
LARGEST, ANY, FEW, MANY, FORCED = map(constexpr, range(5))
# Words of `asked`; the last four are float64.
KIND, ROW, SOURCE, ADJUSTED, ID = map(constexpr, range(5))
KEPT, U, TEMPERATURE, TOP_P, MIN_P = map(constexpr, range(5, ASKED))
WORDS, UNITS = constexpr(ASKED), constexpr(float(1 << 40))


@jit
def rank_of(x):
    """int32 in the order of float32 numbers; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def weight_of(x, largest, temperature):
    """exp((x - largest) / temperature), 0 where x is minus infinity."""
    power = tl.exp((x - tl.where(largest == float("-inf"), 0.0, largest)) / temperature)
    return tl.where(x == float("-inf"), 0.0, power)


@jit
def read(row, at, inside):
    """Logits; what is no number, or too large for one, counts as minus infinity."""
    x = tl.load(row + at, mask=inside, other=float("-inf"))
    return tl.where(x < float("inf"), x, float("-inf"))


@jit
def where_of(logits, asked, V: tl.constexpr, VECTORS: tl.constexpr):
    """Where the logits lie that a choice draws from."""
    own = (logits + tl.load(asked + SOURCE) * V).to(tl.int64)
    other = tl.load(asked + ADJUSTED)
    row = tl.where(other != 0, other, own).to(tl.pointer_type(tl.float32))
    if VECTORS:
        row = tl.multiple_of(row, 16)
    return row


@jit
def real(asked, WORD: tl.constexpr):
    return tl.load((asked + WORD).to(tl.pointer_type(tl.float64)))


@jit
def units_of(x, largest, temperature):
    """int64 weights: their sums are exact, in any order."""
    return (weight_of(x, largest, temperature) * UNITS).to(tl.int64)
