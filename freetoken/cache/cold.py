"""Prefixes that leave the device and come back: which pages and states, under which names.

Stands beside the prefix tree. What the tree gives up for want of memory is kept in a `ColdStore` by a digest
of the tokens that led there; before a prompt is matched, what the store has beyond the tree is put back into
it as if it had just been computed. Knows no bytes and no request. Invariant: a name determines all tokens
before it, so whatever is found under it is the prompt's own beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freetoken.cache.checkpoints import Checkpoints
from freetoken.cache.nodes import Lock, Node, Resource
from freetoken.cache.prefix_tree import Path, PrefixTree
from freetoken.core.prefix import Checkpoint, ColdStore, IntArray, PageSource

TRIES = 4
_SEED = b"\0" * 16


def next_key(key: bytes, page_tokens: IntArray) -> bytes:
    """The digest behind one more whole page."""
    return hashlib.blake2b(key + page_tokens.tobytes(), digest_size=16).digest()


class _Keys:
    """of_pages: digests at the ends of the node's pages. is_needed: something that left stands on it."""

    __slots__ = ("is_needed", "of_pages")

    def __init__(self) -> None:
        self.of_pages: list[bytes] = []
        self.is_needed = False


class PageKeys(Resource):
    """For each page that ends in a node, the digest of all tokens up to its end; made when asked for."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def empty(self) -> Any:
        return _Keys()

    def held(self, node: Node) -> _Keys:
        keys: _Keys = node.held[self.index]
        return keys

    def split(self, upper: Node, lower: Node) -> None:
        over, under = self.held(upper), self.held(lower)
        count = upper.end // self.page_size - upper.start // self.page_size
        over.of_pages, under.of_pages = under.of_pages[:count], under.of_pages[count:]
        over.is_needed = under.is_needed

    def cut(self, node: Node, end: int) -> None:
        del self.held(node).of_pages[max(end // self.page_size - node.start // self.page_size, 0) :]

    def resume_at(self, node: Node, limit: int) -> int:
        return limit

    def of(self, nodes: Sequence[Node]) -> list[bytes]:
        """Digests at page ends 0, 1, ... of a path from the root."""
        size = self.page_size
        out, rest = [_SEED], np.empty(0, np.int32)
        for node in nodes:
            keys, tokens = self.held(node).of_pages, np.concatenate([rest, node.tokens])
            for k in range(len(keys), len(tokens) // size):
                before = keys[-1] if keys else out[-1]
                keys.append(next_key(before, tokens[k * size : (k + 1) * size]))
            out += keys
            rest = tokens[len(tokens) // size * size :]
        return out


@dataclass(frozen=True)
class _Find:
    """What the store can add to a path.

    keys      of the whole pages behind the path's, in order
    base, rest  the place of the state (or of the end): the digest of the pages before it, and the rest
    position  tokens up to there
    """

    keys: list[bytes]
    base: bytes
    rest: bytes
    position: int


class ColdPrefixes:
    """checkpoints: None for models that resume anywhere."""

    def __init__(
        self, tree: PrefixTree, keys: PageKeys, store: ColdStore, checkpoints: Checkpoints | None
    ) -> None:
        self.tree, self.store = tree, store
        self._keys, self._checkpoints = keys, checkpoints
        self._size = tree.page_size
        self.num_revived = self.revived_tokens = 0

    # --- leaving ---

    def leave(self, node: Node, end: int) -> None:
        """The tree is about to drop what lies behind `end` of a node; the caller has it carried out."""
        nodes = _path(node)
        keys, upto = self._keys.of(nodes), self._needed_end(node)
        for k, page in enumerate(self.tree.pages.run(node).pages, node.start // self._size):
            if upto >= (k + 1) * self._size > end and page >= 0:
                self.store.put_page(keys[k + 1], b"", page)
        for position, checkpoint in self._marks(node).items():
            if position > end and checkpoint.slot >= 0:
                self._put_state(nodes, keys, position, checkpoint.slot)
        if upto > node.start:
            self._need(nodes)

    def leave_state(self, checkpoint: Checkpoint) -> None:
        """A checkpoint gives way to others; its pages stay for now."""
        nodes = _path(checkpoint.place)
        self._put_state(nodes, self._keys.of(nodes), checkpoint.position, checkpoint.slot)
        self._need(nodes)
        self.store.carry_out()

    def discard(self, node: Node, end: int) -> None:
        """What lies behind `end` of a node is not to be trusted: the store shall not bring it back."""
        nodes = _path(node)
        keys, size = self._keys.of(nodes), self._size
        whole = max(end, node.start) // size
        for key in keys[whole + 1 : node.end // size + 1]:
            for rest in (b"", *self.store.rests(key)):
                self.store.discard(key, rest)
        # In the page that is sound up to `end`: also states that gave way to others, which the tree forgot.
        for position in range(max(end, node.start) + 1, min(node.end, (whole + 1) * size - 1) + 1):
            self.store.discard(keys[whole], _tokens(nodes, whole * size, position).tobytes())

    def flush(self) -> None:
        """Keep everything that the tree holds; for an orderly stop."""
        for node in self.tree.nodes():
            self.leave(node, node.start)
        self.store.flush()

    def _marks(self, node: Node) -> dict[int, Checkpoint]:
        return self._checkpoints.marks(node) if self._checkpoints is not None else {}

    def _needed_end(self, node: Node) -> int:
        """As far as pages of a node are worth keeping: to what stands on it, or to its last state."""
        if self._checkpoints is None or node.children or self._keys.held(node).is_needed:
            return node.end
        return max((p for p, c in self._marks(node).items() if c.slot >= 0), default=node.start)

    def _need(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            self._keys.held(node).is_needed = True

    def _put_state(self, nodes: Sequence[Node], keys: list[bytes], position: int, slot: int) -> None:
        whole = position // self._size
        rest = _tokens(nodes, whole * self._size, position).tobytes()
        self.store.put_state(keys[whole], rest, slot)
        if rest:
            self.store.put_page(keys[whole], rest, self.tree.pages.tail_of(nodes[-1], position))

    # --- coming back ---

    def revive(
        self, token_ids: IntArray, limit: int, group: str, pages: PageSource
    ) -> tuple[bool, Sequence[int]]:
        """See PrefixCache. What turns out to be damaged is gone; then what is left is tried."""
        unused: list[int] = []
        for _ in range(TRIES):
            is_whole, freed = self._revive(token_ids, limit, group, pages)
            unused += freed
            if is_whole or not freed:
                return is_whole, unused
        return False, unused

    def _revive(
        self, token_ids: IntArray, limit: int, group: str, pages: PageSource
    ) -> tuple[bool, Sequence[int]]:
        path = self.tree.find(token_ids)
        found = self._find(path, token_ids, min(limit, len(token_ids)))
        if found is None:
            return False, ()
        is_beyond = found.position > path.length
        taken = pages(len(found.keys) + bool(found.rest)) if is_beyond else ()
        if taken is None:
            return False, ()
        lock = self.tree.lock(path, path.length)
        try:
            is_whole, checkpoint = self._load(found, taken, group)
        finally:
            self.store.carry_out()
        freed: Sequence[int] = taken
        if is_whole:
            freed = self._grow(lock, token_ids, found, taken) if is_beyond else ()
            if checkpoint is not None and self._checkpoints is not None:
                self._checkpoints.attach(_holder(lock.node, found.position), checkpoint)
            self.num_revived += 1
            self.revived_tokens += max(found.position - path.length, 0)
        self.tree.unlock(lock)
        return is_whole, freed

    def _find(self, path: Path, token_ids: IntArray, limit: int) -> _Find | None:
        size, known = self._size, self._keys.of(path.nodes)
        first = path.length // size
        del known[first + 1 :]
        while (len(known)) * size <= limit:
            key = next_key(known[-1], token_ids[(len(known) - 1) * size : len(known) * size])
            if not self.store.has_page(key, b""):
                break
            known.append(key)
        if self._checkpoints is None:
            position = (len(known) - 1) * size
            return _Find(known[first + 1 :], known[-1], b"", position) if position > path.length else None
        return self._find_state(path, token_ids, limit, known)

    def _find_state(self, path: Path, token_ids: IntArray, limit: int, known: list[bytes]) -> _Find | None:
        """The last place with a state for which all pages are there, if the tree can't resume so late."""
        resumable, size, first = self.tree.resume_at(path, limit), self._size, path.length // self._size
        for count in range(len(known) - 1, resumable // size - 1, -1):
            for rest in sorted(self.store.rests(known[count]), key=len, reverse=True):
                position = count * size + len(rest) // 4
                if not resumable < position <= limit or len(rest) >= 4 * size:
                    continue
                if token_ids[count * size : position].tobytes() != rest:
                    continue
                if rest and position > path.length and not self.store.has_page(known[count], rest):
                    continue
                return _Find(known[first + 1 : count + 1], known[count], rest, position)
        return None

    def _load(self, found: _Find, taken: Sequence[int], group: str) -> tuple[bool, Checkpoint | None]:
        """Fill the pages and, for models with states, a checkpoint; False, and none, if one is damaged."""
        names = [(key, b"") for key in found.keys] + ([(found.base, found.rest)] if found.rest else [])
        if not all(self.store.load_page(*name, page) for name, page in zip(names, taken, strict=False)):
            return False, None
        if self._checkpoints is None:
            return True, None
        checkpoint = self._checkpoints.revive(found.position, group)
        if checkpoint is None:
            return False, None
        if not self.store.load_state(found.base, found.rest, checkpoint.slot):
            self._checkpoints.discard(checkpoint)
            return False, None
        return True, checkpoint

    def _grow(self, lock: Lock, token_ids: IntArray, found: _Find, taken: Sequence[int]) -> Sequence[int]:
        first = lock.position // self._size
        table = [*[-1] * first, *taken]
        tail = taken[-1] if found.rest else -1
        return self.tree.insert(lock, token_ids[: found.position], table, tail).freed


def _path(node: Node | None) -> list[Node]:
    """Nodes from below the root to this one."""
    out = []
    while node is not None and node.parent is not None:
        out.append(node)
        node = node.parent
    return out[::-1]


def _holder(node: Node, position: int) -> Node:
    while node.start >= position:
        assert node.parent is not None
        node = node.parent
    return node


def _tokens(nodes: Sequence[Node], start: int, end: int) -> IntArray:
    """Tokens start .. end of a path."""
    holding = [node for node in nodes if node.end > start]
    parts = [node.tokens[max(start - node.start, 0) : max(end - node.start, 0)] for node in holding]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
