"""A radix tree over token ids: which prefixes are computed, and who gives way when memory runs out.

Owns the nodes, the locks and the order of eviction; pages and checkpoints are resources hung on nodes
(see nodes.py). Knows no request and no bytes. Invariants: each page is owned by one node; a locked
token's page is never freed; work is proportional to the tokens matched or changed.

Eviction takes from the ends of leaves. First what cannot be resumed (behind a leaf's last checkpoint),
then by GreedyDual (Young 1994): a leaf is worth the level at its last use plus the cost of computing a
token there again, and the level rises to what was last given up. So age and cost weigh in one number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from freetoken.cache.nodes import Lock, Node, PageRuns, Resource, joined
from freetoken.core.prefix import Committed, IntArray, num_common

LONG_CONTEXT = 32768
"""Tokens of context at which attention costs about as much again as the rest of a token."""
_EMPTY = np.empty(0, np.int32)


class Path:
    """The nodes that a token sequence runs through, and how many of its tokens they hold."""

    __slots__ = ("length", "nodes")

    def __init__(self, nodes: list[Node], length: int) -> None:
        self.nodes, self.length = nodes, length


class PrefixTree:
    """`resources` beside the pages say where a request can resume; all must agree."""

    def __init__(self, page_size: int, resources: Sequence[Resource] = ()) -> None:
        self.page_size = page_size
        self.pages = PageRuns(page_size)
        self.resources: tuple[Resource, ...] = (self.pages, *resources)
        for index, resource in enumerate(self.resources):
            resource.index = index
        self.root = self._node(None, 0, _EMPTY)
        self.on_evict: Callable[[Node, int], None] = lambda node, end: None
        self.on_distrust: Callable[[Node, int], None] = lambda node, end: None
        self.num_nodes = 0
        self.num_tokens = 0
        self._heap: list[tuple[tuple[int, float, int], int, Node]] = []
        self._level = 0.0
        self._tick = 0
        self._entries = 0

    # --- finding ---

    def find(self, token_ids: IntArray) -> Path:
        """Follow the tokens as far as the tree knows them, and note the use."""
        self._tick += 1
        node, at, nodes = self.root, 0, []
        while at < len(token_ids) and (child := node.children.get(int(token_ids[at]))) is not None:
            at += num_common(child.tokens, token_ids[at:])
            nodes.append(child)
            node = child
            if at < child.end:
                break
        for node in nodes:
            self._touch(node)
        return Path(nodes, at)

    def resume_at(self, path: Path, limit: int) -> int:
        """Largest number of the path's tokens, at most `limit`, behind which all resources can resume."""
        for node in reversed(path.nodes):
            at = min(limit, path.length, node.end)
            while at > node.start:
                agreed = min(resource.resume_at(node, at) for resource in self.resources)
                if agreed == at:
                    return at
                at = agreed
        return 0

    def whole_pages(self, path: Path, num_tokens: int, first: int = 0) -> list[int]:
        """Pages first .. num_tokens // page_size of a path."""
        stop, out = num_tokens // self.page_size, []
        for node in path.nodes:
            begin = node.start // self.page_size
            out += self.pages.run(node).pages[max(first - begin, 0) : max(stop - begin, 0)]
        return out

    # --- locks ---

    def lock(self, path: Path, num_tokens: int) -> Lock:
        node = next((n for n in path.nodes if n.end >= num_tokens), self.root) if num_tokens else self.root
        lock = Lock(node, num_tokens)
        self._hold(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        lock.node.holds.remove(lock)
        for node in _upwards(lock.node):
            node.locks -= 1
        self._offer(lock.node)

    def _hold(self, lock: Lock) -> None:
        lock.node.holds.append(lock)
        for node in _upwards(lock.node):
            node.locks += 1

    # --- growing ---

    def insert(self, lock: Lock, token_ids: IntArray, page_ids: Sequence[int], tail: int) -> Committed:
        """Add tokens behind the ones that `lock` holds; the lock moves to their end. See PrefixCache."""
        size, first = self.page_size, lock.position // self.page_size
        length = len(token_ids) if tail >= 0 else len(token_ids) // size * size
        if length <= lock.position:
            return Committed(first, (), (tail,) if tail >= 0 else ())
        token_ids = token_ids[:length]
        path = self._walk_on(lock, token_ids)
        known = path.length // size
        theirs = self.whole_pages(path, path.length, first)
        freed = list(page_ids[first:known])
        if path.length < length:
            ours = list(page_ids[known : length // size])
            self._grow(path, token_ids, ours, tail if length % size else -1)
            theirs += ours
            freed += [tail] if tail >= 0 and length % size == 0 else []
        elif tail >= 0:
            freed.append(tail)
        freed += self._freed()
        self._move(lock, path.nodes[-1], length)
        return Committed(first, theirs, freed)

    def _walk_on(self, lock: Lock, token_ids: IntArray) -> Path:
        """The path from the lock's node on, as far as `token_ids` is known."""
        self._tick += 1
        node, at, nodes = lock.node, lock.position, [lock.node]
        while True:
            at += num_common(node.tokens[at - node.start :], token_ids[at:])
            if at < node.end or at == len(token_ids):
                break
            child = node.children.get(int(token_ids[at]))
            if child is None:
                break
            node = child
            nodes.append(node)
        for node in nodes:
            self._touch(node)
        return Path(nodes, at)

    def _grow(self, path: Path, token_ids: IntArray, pages: list[int], tail: int) -> None:
        """Append what `path` doesn't know: to its leaf, or as a branch."""
        node, at = path.nodes[-1], path.length
        if at < node.end:
            node = self._split(node, at)
            path.nodes[-1] = node
        if node.children or node is self.root:
            node = self._node(node, at, np.array(token_ids[at:], np.int32))
            assert node.parent is not None
            node.parent.children[node.first] = node
            self.num_nodes += 1
            path.nodes.append(node)
        else:
            node.tokens = joined(node.tokens, token_ids[at:])
        self.num_tokens += len(token_ids) - at
        self.pages.extend(node, pages, tail)
        self._touch(node)
        self._offer(node)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the new upper part. Locks stay with the tokens they hold."""
        parent = node.parent
        assert parent is not None
        upper = self._node(parent, node.start, node.tokens[: at - node.start].copy())
        parent.children[upper.first] = upper
        node.tokens = node.tokens[at - node.start :].copy()
        node.start, node.parent = at, upper
        upper.children[node.first] = node
        upper.level, upper.seen, upper.locks = node.level, node.seen, node.locks
        upper.proved, node.proved = min(node.proved, at), max(node.proved, at)
        upper.holds = [hold for hold in node.holds if hold.position <= at]
        node.holds = [hold for hold in node.holds if hold.position > at]
        for hold in upper.holds:
            hold.node = upper
        node.locks -= len(upper.holds)
        for resource in self.resources:
            resource.split(upper, node)
        self.num_nodes += 1
        self._offer(node)
        return upper

    def _move(self, lock: Lock, node: Node, position: int) -> None:
        old = lock.node
        old.holds.remove(lock)
        for n in _upwards(old):
            n.locks -= 1
        lock.node, lock.position = node, position
        self._hold(lock)
        self._offer(old)

    def _node(self, parent: Node | None, start: int, tokens: IntArray) -> Node:
        node = Node(parent, start, tokens)
        node.held = [resource.empty() for resource in self.resources]
        return node

    def _touch(self, node: Node) -> None:
        node.level, node.seen = self._level, self._tick
        for resource in self.resources:
            resource.touch(node)

    # --- giving up ---

    def evict(self, num_pages: int) -> list[int]:
        """Free pages until there are `num_pages` or nothing is unlocked."""
        self.pages.freed.clear()
        while self._heap and len(self.pages.freed) < num_pages:
            key, number, node = heapq.heappop(self._heap)
            if node.entry != (key, number):
                continue
            node.entry = None
            now = self._key(node)
            if now is not None and now > key:
                self._offer(node)
            elif now is not None:
                self._level = max(self._level, now[1])
                self._shorten(node, num_pages - len(self.pages.freed), dead=now[0] == 0)
        return self._freed()

    def prove(self, lock: Lock, num_tokens: int) -> None:
        """A finite answer stood on the first `num_tokens` that `lock` holds."""
        count, node = min(num_tokens, lock.position), lock.node
        while node.parent is not None:
            end = min(node.end, count)
            if node.start < end <= node.proved:
                return
            node.proved = max(node.proved, end)
            node = node.parent

    def forget(self, lock: Lock) -> list[int]:
        """Unlock, and drop what nothing proves of the path, and what stands on that."""
        node, below = lock.node, None
        self.unlock(lock)
        while node.parent is not None and node.proved == node.start:
            node, below = node.parent, node
        if node.parent is not None and node.proved < node.end:
            doubted = list(node.children.values())
        else:
            doubted = [below] if below is not None else []
        for child in doubted:
            self._drop(child)
        if node.parent is not None and node.proved < node.end and not node.children:
            self._give_up(node, node.proved // self.page_size * self.page_size)
        return self._freed()

    def _drop(self, top: Node) -> None:
        """Give up a node and all below it that is not locked."""
        order = [top]
        for node in order:
            order += node.children.values()
        for node in reversed(order):
            if not node.children:
                self._give_up(node, node.start)

    def _give_up(self, leaf: Node, end: int) -> None:
        """Cut an untrusted leaf at a page's end, or behind what is locked; without either it goes."""
        if leaf.locks:
            end = max(end, self._page_up(leaf.locked_end))
        self.on_distrust(leaf, max(end, leaf.start))
        if end > leaf.start:
            self._cut(leaf, end)
        else:
            self._remove(leaf)

    def changed(self, node: Node) -> None:
        """A resource lost something here: the node may be worth less now."""
        self._offer(node)

    def _shorten(self, node: Node, num_pages: int, *, dead: bool) -> None:
        """Take pages from a leaf's end: all that can't be resumed, or as many as are wanted."""
        size = self.page_size
        end = self._useful_end(node) if dead else (-(-node.end // size) - num_pages) * size
        if node.locks or end > node.start:
            end = self._page_up(max(end, node.locked_end))
            self.on_evict(node, end)
            self._cut(node, end)
        else:
            self.on_evict(node, node.start)
            self._remove(node)

    def _cut(self, node: Node, end: int) -> None:
        if end >= node.end:
            return
        for resource in self.resources:
            resource.cut(node, end)
        self.num_tokens -= node.end - end
        node.tokens = node.tokens[: end - node.start].copy()
        node.proved = min(node.proved, end)
        self._offer(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        for resource in self.resources:
            resource.cut(node, node.start)
        self.num_tokens -= len(node.tokens)
        self.num_nodes -= 1
        del parent.children[node.first]
        node.parent = node.entry = None
        self._offer(parent)

    def _useful_end(self, node: Node) -> int:
        """Where a leaf's last resumable prefix ends; its start if there is none inside."""
        at = min(resource.resume_at(node, node.end) for resource in self.resources)
        return max(at, node.locked_end)

    def _page_up(self, position: int) -> int:
        return -(-position // self.page_size) * self.page_size

    def _key(self, node: Node) -> tuple[int, float, int] | None:
        """Worth of a leaf's end, least first; None if nothing of it can be given up."""
        if node.children or node.parent is None:
            return None
        if self._page_up(node.locked_end) >= node.end and node.locks:
            return None
        if self._page_up(self._useful_end(node)) < node.end or self._useful_end(node) <= node.start:
            return (0, 0.0, node.seen)
        return (1, node.level + 1.0 + node.end / LONG_CONTEXT, node.seen)

    def _offer(self, node: Node) -> None:
        """Put a leaf in the queue of candidates unless it stands there with no greater a worth."""
        key = self._key(node)
        if key is None or (node.entry is not None and node.entry[0] <= key):
            return
        self._entries += 1
        node.entry = (key, self._entries)
        heapq.heappush(self._heap, (key, self._entries, node))
        if len(self._heap) > 4 * self.num_nodes + 64:
            self._heap = [item for item in self._heap if item[2].entry == item[:2]]
            heapq.heapify(self._heap)

    def _freed(self) -> list[int]:
        freed = list(self.pages.freed)
        self.pages.freed.clear()
        return freed

    # --- for resizes and tests ---

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise AssertionError when a page is lost or owned twice, or a lock is counted wrong."""
        pages: list[int] = []
        for node in self.nodes():
            run = self.pages.run(node)
            whole = node.end // self.page_size - node.start // self.page_size
            assert len(run.pages) == whole, "a page is lost"
            assert len(node.tokens), "an empty node"
            tail = node.end % self.page_size and not node.children
            assert (run.tail >= 0) == bool(tail), "a tail is missing or left over"
            pages += [*run.pages, *([run.tail] if tail else [])]
            below = sum(child.locks for child in node.children.values())
            assert node.locks == below + len(node.holds), "locks are miscounted"
            assert all(node.start < hold.position <= node.end for hold in node.holds), "a lock is astray"
            assert self._key(node) is None or node.entry is not None, "a candidate is not queued"
            assert node.start <= node.proved <= node.end, "proved beyond its tokens"
            above = node.parent
            is_sound = above is None or above is self.root or above.proved == above.end
            assert is_sound or node.proved == node.start, "proved on doubtful ground"
        assert len(set(pages)) == len(pages) == self.pages.num_pages, "a page is owned twice"


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
