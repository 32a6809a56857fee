"""The null prefix cache: nothing is ever reused. The oracle of every other choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freetoken.core.interfaces import Prefix, PrefixCache


class NullCache(PrefixCache):
    def match(self, token_ids: np.ndarray) -> Prefix:
        return Prefix()

    def commit(self, token_ids: np.ndarray, page_ids: Sequence[int]) -> Sequence[int]:
        return ()

    def release(self, prefix: Prefix) -> None:
        return None

    def evict(self, num_pages: int) -> Sequence[int]:
        return ()


def create() -> NullCache:
    return NullCache()
