"""The null prefix cache: nothing is ever reused. The oracle of every other choice."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.core.prefix import Committed, IntArray, Prefix, PrefixCache


class NullCache(PrefixCache):
    keeps = False

    def match(self, token_ids: IntArray, limit: int, group: str = "") -> Prefix:
        return Prefix()

    def commit(
        self, prefix: Prefix, token_ids: IntArray, page_ids: Sequence[int], tail_page: int = -1
    ) -> tuple[Prefix, Committed]:
        return prefix, Committed(0, (), (tail_page,) if tail_page >= 0 else ())

    def release(self, prefix: Prefix) -> None:
        """Nothing is locked."""

    def evict(self, num_pages: int) -> Sequence[int]:
        return ()
