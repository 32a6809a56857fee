"""Token embedding: rows of a table [V, H] of the compute dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Embedding:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        return F.embedding(ids, self.weight)
