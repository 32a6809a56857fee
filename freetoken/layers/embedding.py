"""Token embedding: rows of a table [V, H], in numbers of the compute dtype or in codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken.core.weights import CodedWeight
from freetoken.kernels.coded_linear import rows_of


class Embedding:
    """`weight`   the table;  `dtype`   of the rows, if they are decoded."""

    def __init__(self, weight: Tensor | CodedWeight, dtype: torch.dtype = torch.float32) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        if isinstance(self.weight, CodedWeight):
            return rows_of(self.weight, ids).to(self.dtype)
        return F.embedding(ids, self.weight)
