"""Row-invariant products: every row goes through a GEMM of one and the same shape.

A BLAS picks its kernel, and with it the order of a sum, by the shape of the product. Padding rows to
blocks of M makes the shape constant, so a row's result never depends on its neighbours, its position
or how many there are. A batch of equal products is as good as a loop over them (tested).
"""

from __future__ import annotations

import torch
from torch import Tensor

M = 16


def to_blocks(x: Tensor) -> Tensor:
    """[R, K] -> contiguous float32 [ceil(R / M), M, K], padded with zero rows."""
    rows, width = x.shape
    blocks = -(-rows // M)
    if rows == blocks * M:
        return x.float().contiguous().view(blocks, M, width)
    padded = torch.zeros(blocks * M, width, dtype=torch.float32, device=x.device)
    padded[:rows] = x
    return padded.view(blocks, M, width)
