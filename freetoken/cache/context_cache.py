"""The prefix cache that serves: a radix tree of pages, with checkpoints where states are recurrent.

Joins the tree's policy (prefix_tree.py) with the checkpoints' (checkpoints.py) behind the PrefixCache
contract. Knows no request. Invariant: what `match` returns is locked, complete and resumable: pages,
the page to copy the rest from, and a checkpoint exactly at its end if the model needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freetoken.cache.checkpoints import Checkpoints
from freetoken.cache.cold import ColdPrefixes, PageKeys
from freetoken.cache.nodes import Lock, Node, Resource
from freetoken.cache.prefix_tree import PrefixTree
from freetoken.core.prefix import (
    Checkpoint,
    ColdStore,
    Committed,
    IntArray,
    PageSource,
    Prefix,
    PrefixCache,
)


class ContextCache(PrefixCache):
    """checkpoints: None for models that resume anywhere. store: keeps what leaves the device."""

    def __init__(
        self, page_size: int, checkpoints: Checkpoints | None = None, store: ColdStore | None = None
    ) -> None:
        self.checkpoints = checkpoints
        keys = PageKeys(page_size)
        resources: list[Resource] = [checkpoints] if checkpoints else []
        self.tree = PrefixTree(page_size, [*resources, keys] if store else resources)
        if checkpoints:
            checkpoints.on_change = self.tree.changed
        self.cold: ColdPrefixes | None = None
        if store is not None:
            self.cold = ColdPrefixes(self.tree, keys, store, checkpoints)
            self.tree.on_evict = self.cold.leave
            self.tree.on_distrust = self.cold.discard
            if checkpoints:
                checkpoints.on_drop = self.cold.leave_state
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        return self.tree.pages.num_pages

    @property
    def num_units(self) -> int:
        return self.checkpoints.num_units if self.checkpoints else 0

    @property
    def num_slots(self) -> int:
        return self.checkpoints.slots.num_used if self.checkpoints else 0

    def match(self, token_ids: IntArray, limit: int, group: str = "") -> Prefix:
        path = self.tree.find(token_ids)
        at = self.tree.resume_at(path, limit)
        lock = self.tree.lock(path, at)
        checkpoint = None
        if self.checkpoints:
            self.checkpoints.use(group)
            checkpoint = self.checkpoints.marks(lock.node).get(at)
        tail = self.tree.pages.tail_of(lock.node, at) if at % self.tree.page_size else -1
        pages = tuple(self.tree.whole_pages(path, at))
        return Prefix(at, pages, tail, checkpoint, path.length, lock)

    def commit(
        self, prefix: Prefix, token_ids: IntArray, page_ids: Sequence[int], tail_page: int = -1
    ) -> tuple[Prefix, Committed]:
        lock = _lock(prefix)
        done = self.tree.insert(lock, token_ids, page_ids, tail_page)
        return Prefix(lock.position, lock=lock), done

    def release(self, prefix: Prefix) -> None:
        self.tree.unlock(_lock(prefix))

    def prove(self, prefix: Prefix, num_tokens: int) -> None:
        self.tree.prove(_lock(prefix), num_tokens)

    def forget(self, prefix: Prefix) -> Sequence[int]:
        return self.tree.forget(_lock(prefix))

    def evict(self, num_pages: int) -> Sequence[int]:
        try:
            pages = self.tree.evict(num_pages)
        finally:
            if self.cold:
                self.cold.store.carry_out()
        self.num_evicted += len(pages)
        return pages

    def clear(self) -> Sequence[int]:
        """Forgotten, not put away: nothing of it comes back."""
        leave, self.tree.on_evict = self.tree.on_evict, lambda node, end: None
        try:
            return self.tree.evict(1 << 60)
        finally:
            self.tree.on_evict = leave

    def revive(
        self, token_ids: IntArray, limit: int, group: str, pages: PageSource
    ) -> tuple[bool, Sequence[int]]:
        return self.cold.revive(token_ids, limit, group, pages) if self.cold else (False, ())

    def flush(self) -> None:
        if self.cold and self.cold.store.lasts:
            self.cold.flush()

    def close(self) -> None:
        if self.cold:
            self.cold.store.close()

    def pinned_pages(self) -> int:
        """Whole pages up to each lock, and the page in which a lock ends."""
        size, pinned = self.tree.page_size, 0
        for node in self.tree.nodes():
            if node.locks > len(node.holds):
                pinned += node.end // size - node.start // size
            elif node.locks:
                pinned += -(-node.locked_end // size) - node.start // size
        return pinned

    def moved(self, pages: Mapping[int, int]) -> None:
        for node in self.tree.nodes():
            self.tree.pages.moved(node, pages)

    # --- recurrent states ---

    def wants_states(self) -> bool:
        return self.checkpoints is not None

    def num_reservable(self) -> int:
        return self.checkpoints.num_reservable() if self.checkpoints else 0

    def reserve(self, position: int, group: str) -> Checkpoint | None:
        return self.checkpoints.reserve(position, group) if self.checkpoints else None

    def yield_unit(self, *, wait: bool) -> bool:
        return self.checkpoints.yield_unit(wait=wait) if self.checkpoints else False

    def adopt(self, position: int, group: str, unit: int) -> Checkpoint | None:
        return self.checkpoints.adopt(position, group, unit) if self.checkpoints else None

    def stow(self, checkpoint: Checkpoint) -> None:
        if self.checkpoints:
            self.checkpoints.stow(checkpoint)

    def attach(self, prefix: Prefix, checkpoints: Sequence[Checkpoint]) -> None:
        if not self.checkpoints:
            return
        lock = _lock(prefix)
        for checkpoint in checkpoints:
            node = _holder(lock.node, checkpoint.position)
            if node is None or checkpoint.position > lock.position:
                self.checkpoints.discard(checkpoint)
            else:
                self.checkpoints.attach(node, checkpoint)
                self.tree.changed(node)

    def discard(self, checkpoint: Checkpoint) -> None:
        if self.checkpoints:
            self.checkpoints.discard(checkpoint)

    def restore(self, prefix: Prefix, unit: int) -> None:
        if self.checkpoints and prefix.checkpoint is not None:
            self.checkpoints.restore(prefix.checkpoint, unit)

    def snapshot(self) -> dict[str, int]:
        counts = {
            "tokens": self.tree.num_tokens,
            "nodes": self.tree.num_nodes,
            "pages": self.num_pages,
            "evicted_pages": self.num_evicted,
        }
        if self.cold:
            counts |= {"revived": self.cold.num_revived, "revived_tokens": self.cold.revived_tokens}
            counts |= self.cold.store.snapshot()
        return counts | (self.checkpoints.snapshot() if self.checkpoints else {})

    def check(self) -> None:
        """Raise AssertionError when pages, locks or places are out of order."""
        self.tree.check()
        if self.checkpoints:
            self.checkpoints.check()


def _lock(prefix: Prefix) -> Lock:
    assert isinstance(prefix.lock, Lock), "a prefix of another cache"
    return prefix.lock


def _holder(node: Node | None, position: int) -> Node | None:
    """The node of a locked path in which `position` lies."""
    while node is not None and node.start >= position:
        node = node.parent
    return node if node is not None and position > 0 else None
