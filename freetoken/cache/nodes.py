"""Nodes of the prefix tree and what hangs on them.

A node is a run of tokens [start, end); the tree branches at single tokens, pages end where they end. A
`Resource` keeps something per node (pages, state checkpoints) and says where a request may resume; the
tree tells it when nodes split, shrink and go.

Pages: a whole page belongs to the node in which it ends, so one that straddles a branch exists once per
branch. A leaf that ends inside a page owns that partial page too. Hence for each prefix in the tree
some page below it holds its last, partial page (`tail_of`).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from freetoken.core.prefix import IntArray


class Lock:
    """A request's hold on the first `position` tokens of a path; `node` is where they end."""

    __slots__ = ("node", "position")

    def __init__(self, node: Node, position: int) -> None:
        self.node, self.position = node, position


class Node:
    """A run of tokens and what hangs on it.

    tokens  int32 [end - start]
    locks   holds on this node or below; `holds`: those that end here
    proved  tokens before this position gave a finite answer (start: none of this node's)
    """

    __slots__ = (
        "children", "entry", "held", "holds", "level", "locks", "parent", "proved", "seen", "start", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, tokens: IntArray) -> None:
        self.parent, self.start, self.tokens = parent, start, tokens
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.holds: list[Lock] = []
        self.level = 0.0
        self.seen = 0
        self.proved = start
        self.entry: Any = None
        self.held: list[Any] = []

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def first(self) -> int:
        """The token by which the parent knows this node."""
        return int(self.tokens[0])

    @property
    def locked_end(self) -> int:
        """Tokens before this position are in use (start if none of this node's own)."""
        if self.locks > len(self.holds):
            return self.end
        return max((hold.position for hold in self.holds), default=self.start)


class Resource(abc.ABC):
    """Something kept per node in `node.held[index]`; the tree assigns `index`."""

    index: int

    @abc.abstractmethod
    def empty(self) -> Any:
        """What a new node holds."""

    def touch(self, node: Node) -> None:
        """The node was used."""

    @abc.abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new and takes what lies before lower.start."""

    @abc.abstractmethod
    def cut(self, node: Node, end: int) -> None:
        """Give up what lies behind `end` (node.start: everything). The node still has its old end."""

    @abc.abstractmethod
    def resume_at(self, node: Node, limit: int) -> int:
        """Largest position in (node.start, limit] from which a request may go on, -1 if none."""


class PageRuns(Resource):
    """KV pages of full attention: page k of a node is the k-th that ends inside it; a leaf's tail."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.freed: list[int] = []

    def empty(self) -> Any:
        return _Run()

    def run(self, node: Node) -> _Run:
        run: _Run = node.held[self.index]
        return run

    def split(self, upper: Node, lower: Node) -> None:
        run, size = self.run(lower), self.page_size
        count = upper.end // size - upper.start // size
        self.run(upper).pages, run.pages = run.pages[:count], run.pages[count:]

    def extend(self, node: Node, pages: list[int], tail: int) -> None:
        """Own more pages; they follow the node's last whole one. `node` already has its new end."""
        run = self.run(node)
        if run.tail >= 0:
            self._free([run.tail])
        run.pages += pages
        run.tail = tail
        self.num_pages += len(pages) + (tail >= 0)

    def cut(self, node: Node, end: int) -> None:
        run, size = self.run(node), self.page_size
        if end <= node.start:
            self._hand_up(node)
        count = end // size - node.start // size
        if run.tail >= 0:
            self._free([run.tail])
            run.tail = -1
        self._free(run.pages[count:])
        del run.pages[count:]

    def _hand_up(self, node: Node) -> None:
        """A node that goes leaves its parent the page in which the parent ends, if nobody else has it."""
        parent, run = node.parent, self.run(node)
        assert parent is not None
        if parent.start == parent.end or parent.end % self.page_size == 0 or len(parent.children) > 1:
            return
        if run.pages:
            self.run(parent).tail = run.pages.pop(0)
            # Keeps the count of whole pages right for the cut that follows.
            run.pages.insert(0, -1)
        else:
            self.run(parent).tail, run.tail = run.tail, -1

    def resume_at(self, node: Node, limit: int) -> int:
        return limit

    def tail_of(self, node: Node, position: int) -> int:
        """A page whose first position % page_size tokens are the ones before `position` in `node`."""
        index = position // self.page_size
        while True:
            run = self.run(node)
            at = index - node.start // self.page_size
            if 0 <= at < len(run.pages):
                return run.pages[at]
            if run.tail >= 0:
                return run.tail
            node = next(iter(node.children.values()))

    def moved(self, node: Node, names: Mapping[int, int]) -> None:
        run = self.run(node)
        run.pages = [names.get(p, p) for p in run.pages]
        run.tail = names.get(run.tail, run.tail)

    def _free(self, pages: list[int]) -> None:
        real = [p for p in pages if p >= 0]
        self.freed += real
        self.num_pages -= len(real)


class _Run:
    __slots__ = ("pages", "tail")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.tail = -1


def joined(a: IntArray, b: IntArray) -> IntArray:
    return np.concatenate([a, b]).astype(np.int32, copy=False)
