"""y = x W^T + b for a matrix in a weight format's codes, decoded while it is multiplied.

    coded_linear(x, weight, bias, int8)
        x        16-bit or float32 [.., K]
        weight   CodedWeight [N, K]            bias [N] of x's dtype, or None
        int8     x becomes signed bytes first, 32 with a scale (`reference.octets`), where a format has that
        Returns  [.., N] in x's dtype

Rounding points: weights exactly as their format decodes, sums at least in float32, one rounding. `fast` says
whether a maker beats decoding once and multiplying with plain numbers. Neither mutates nor syncs.

    rows_of(weight, ids)            float32 [n, K]: rows int64 [n] of a packed matrix, columns as they lie
"""

from __future__ import annotations

from torch import Tensor

from freetoken.core.weights import CodedWeight, WeightFormat
from freetoken.kernels._choose import choose
from freetoken.kernels.coded_linear import native, reference

MAKERS = (reference, native)


def fast(device_type: str, fmt: WeightFormat, shape: tuple[int, int]) -> bool:
    """True if the device's maker multiplies with this format's codes as they are."""
    return bool(choose(MAKERS, device_type).takes(fmt, shape))


def every_number(weight: CodedWeight) -> Tensor:
    """float32 [N, K], on the host, columns as they lie: what `reference` decodes, bit by bit."""
    out: Tensor = choose(MAKERS, "cpu").every_number(weight)
    return out


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, *, int8: bool = False) -> Tensor:
    out: Tensor = choose(MAKERS, x.device.type).coded_linear(x, weight, bias, int8)
    return out


def rows_of(weight: CodedWeight, ids: Tensor) -> Tensor:
    out: Tensor = choose(MAKERS, ids.device.type).rows_of(weight, ids)
    return out
