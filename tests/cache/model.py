"""An independent model of the prefix cache: sets of token tuples, and memory that remembers what it holds.

Requests are played by the model itself: it writes tokens into pages and states, so a page or state that
is given to the wrong request shows at once.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from freetoken.cache.checkpoints import Checkpoints
from freetoken.cache.context_cache import ContextCache
from freetoken.cache.pages import UnitAllocator
from freetoken.core.prefix import Checkpoint, ColdStore, Prefix, UnitMover

Tokens = tuple[int, ...]


class SlowMover(UnitMover):
    """Copies to host memory complete when `advance` says so, and read the unit only then."""

    def __init__(self) -> None:
        self.unit: dict[int, Tokens] = {}
        self.slot: dict[int, Tokens] = {}
        self.page: dict[int, Tokens] = {}
        self.pending: list[tuple[int, int]] = []

    def copy_page(self, src: int, dst: int) -> None:
        self.page[dst] = self.page[src]

    def copy_state(self, src: int, dst: int) -> None:
        self.unit[dst] = self.unit[src]

    def save_state(self, unit: int, slot: int) -> None:
        self.slot[slot] = (-1,)
        self.pending.append((unit, slot))

    def load_state(self, slot: int, unit: int) -> None:
        self.advance(len(self.pending))
        self.unit[unit] = self.slot[slot]

    def is_saved(self, unit: int) -> bool:
        return all(unit != u for u, _ in self.pending)

    def wait_saved(self, unit: int) -> None:
        self.advance(len(self.pending))

    def advance(self, count: int) -> None:
        for unit, slot in self.pending[:count]:
            self.slot[slot] = self.unit[unit]
        del self.pending[:count]


class Shelf(ColdStore):
    """Keeps what left, by name; the oldest gives way, and `damage` spoils one entry."""

    def __init__(self, mover: SlowMover, capacity: int) -> None:
        self.mover, self.capacity = mover, capacity
        self.held: OrderedDict[tuple[str, bytes, bytes], Tokens] = OrderedDict()
        self.damaged: set[tuple[str, bytes, bytes]] = set()
        self.num_loaded = self.num_damaged = 0

    def has_page(self, key, rest):
        return ("page", key, rest) in self.held

    def rests(self, key):
        return {r for kind, k, r in self.held if kind == "state" and k == key}

    def put_page(self, key, rest, page):
        self._put(("page", key, rest), self.mover.page[page])

    def put_state(self, key, rest, slot):
        self.mover.advance(len(self.mover.pending))
        self._put(("state", key, rest), self.mover.slot[slot])

    def load_page(self, key, rest, page):
        found = self._get(("page", key, rest))
        self.mover.page[page] = found
        return found != ()

    def load_state(self, key, rest, slot):
        self.mover.advance(len(self.mover.pending))  # one stream: earlier copies to the slot come first
        found = self._get(("state", key, rest))
        self.mover.slot[slot] = found
        return found != ()

    def discard(self, key, rest):
        for kind in ("page", "state"):
            self.held.pop((kind, key, rest), None)

    def damage(self) -> None:
        if self.held:
            self.damaged.add(next(iter(self.held)))

    def _put(self, name, tokens):
        self.held[name] = tokens
        self.held.move_to_end(name)
        self.damaged.discard(name)
        if len(self.held) > self.capacity:
            self.held.popitem(last=False)

    def _get(self, name):
        if name in self.damaged:
            self.damaged.discard(name)
            self.held.pop(name, None)
            self.num_damaged += 1
            return ()
        self.num_loaded += 1
        return self.held.get(name, ())


@dataclass
class Player:
    """One request: `tokens` to compute, `done` of them computed into pages and a state."""

    tokens: Tokens
    prefix: Prefix
    pages: list[int]
    unit: int
    done: int
    shared: int
    saved: list[Checkpoint] = field(default_factory=list)


class World:
    """A cache, its memory, its players and what the model knows about both."""

    def __init__(
        self,
        page: int = 4,
        pages: int = 40,
        working: int = 3,
        slots: int = 5,
        states: bool = True,
        store: bool = False,
    ):
        self.size = page
        self.mover = SlowMover()
        self.pages = UnitAllocator("pages", pages + 1)
        self.units = UnitAllocator("units", 6 + working + 1)
        self.checkpoints = Checkpoints(self.units, working, slots, self.mover) if states else None
        self.store = Shelf(self.mover, capacity=150 // page) if store else None
        self.cache = ContextCache(page, self.checkpoints, self.store)
        self.players: list[Player] = []
        self.seen: list[Tokens] = []
        self.proved: set[Tokens] = {()}
        self.proved_once: set[Tokens] = {()}

    # --- what players do ---

    def arrive(self, tokens: Tokens, group: str = "") -> Player | None:
        """Match, check what came, and take it over; None if nothing fits."""
        ids = np.array(tokens, np.int32)
        if self.store is not None:
            self.revive(tokens, group)
        prefix = self.cache.match(ids, len(ids) - 1, group)
        self._check_match(tokens, prefix)
        need = -(-len(tokens) // self.size) - len(prefix.page_ids)
        has_unit = self.units.num_free or self.cache.yield_unit(wait=not self.players)
        if not self.make_room(need) or not has_unit:
            self.cache.release(prefix)
            return None
        player = Player(tokens, prefix, list(prefix.page_ids), 0, prefix.num_tokens, len(prefix.page_ids))
        if prefix.tail_page >= 0:
            own = self.pages.take(1)[0]
            self.mover.copy_page(prefix.tail_page, own)
            player.pages.append(own)
        player.pages += self.pages.take(-(-len(tokens) // self.size) - len(player.pages))
        player.unit = self.units.take(1)[0]
        self.mover.unit[player.unit] = ()
        if prefix.checkpoint is not None:
            self.cache.restore(prefix, player.unit)
            assert self.mover.unit[player.unit] == tokens[: prefix.num_tokens], "a state of somebody else"
        for k in range(player.done // self.size + 1):
            mine = tokens[k * self.size : player.done][: self.size]
            if mine:
                assert self.mover.page[player.pages[k]][: len(mine)] == mine, "a page of somebody else"
        self.players.append(player)
        self.seen = [*self.seen[-20:], tokens]
        return player

    def revive(self, tokens: Tokens, group: str) -> None:
        """What comes back are beginnings of this prompt, and only they."""
        assert self.store is not None
        ids, before, damaged = np.array(tokens, np.int32), self.closure(), self.store.num_damaged
        at = self.cache.match(ids, len(ids) - 1, group)
        self.cache.release(at)
        came = self._revive(tokens, len(ids) - 1, group)
        added = self.closure() - before
        assert added <= {tokens[:n] for n in range(len(tokens))}, "something else came back"
        now = self.cache.match(ids, len(ids) - 1, group)
        self.cache.release(now)
        # Room for a damaged state may have been another's, which came back in its stead.
        least = at.num_tokens + (self.store.num_damaged == damaged)
        assert now.num_tokens >= least if came else not added, "it came for nothing"

    def _revive(self, tokens: Tokens, limit: int, group: str) -> bool:
        def pages(count: int):
            return self.pages.take(count) if count <= self.pages.num_free else None

        came, back = self.cache.revive(np.array(tokens, np.int32), limit, group, pages)
        self.pages.give_back(back)
        return came

    def compute(self, player: Player, count: int) -> None:
        for _ in range(min(count, len(player.tokens) - player.done)):
            index, offset = divmod(player.done, self.size)
            assert index >= player.shared, "a shared page would be written"
            page = player.pages[index]
            old = self.mover.page.get(page, ())
            self.mover.page[page] = (*old[:offset], player.tokens[player.done])
            player.done += 1
            self.mover.unit[player.unit] = player.tokens[: player.done]

    def save(self, player: Player, group: str = "") -> None:
        checkpoint = self.cache.reserve(player.done, group)
        if checkpoint is not None:
            self.mover.copy_state(player.unit, checkpoint.unit)
            self.cache.stow(checkpoint)
            player.saved.append(checkpoint)

    def commit(self, player: Player, *, tail: int = -1) -> None:
        tokens = player.tokens[: player.done]
        if tail < 0:
            tokens = tokens[: len(tokens) // self.size * self.size]
        before = self.closure()
        start = player.prefix.lock.position
        ids = np.array(player.tokens[: player.done], np.int32)
        player.prefix, done = self.cache.commit(player.prefix, ids, player.pages, tail)
        player.pages[done.first : done.first + len(done.page_ids)] = done.page_ids
        player.shared = max(player.shared, done.first + len(done.page_ids))
        self.pages.give_back(done.freed)
        want = before | {tokens[:n] for n in range(start, len(tokens) + 1)}
        assert self.closure() == want, "a commit adds its tokens and nothing else"
        end = player.prefix.lock.position
        ready = [c for c in player.saved if c.position <= end]
        player.saved = [c for c in player.saved if c.position > end]
        self.cache.attach(player.prefix, ready)

    def finish(self, player: Player, *, donate: bool) -> None:
        whole, rest = divmod(player.done, self.size)
        last = player.pages[whole] if rest else -1
        if donate:
            taken = self.cache.adopt(player.done, "", player.unit)
            if taken is not None:
                player.saved.append(taken)
                self.cache.stow(taken)
                player.unit = 0
        self.commit(player, tail=last)
        self._leave(player, whole + (rest > 0))
        self.cache.release(player.prefix)

    def prove(self, player: Player) -> None:
        """What it has computed gave an answer."""
        end = min(player.done, player.prefix.lock.position)
        self.cache.prove(player.prefix, player.done)
        self.proved |= {player.tokens[:n] for n in range(end + 1)}
        self.proved_once |= self.proved

    def fail(self, player: Player) -> None:
        """What was handed over is not to be trusted unless it is proved, nor what stands on it."""
        self._leave(player, player.shared)
        before, tokens = self.closure(), player.tokens[: player.prefix.lock.position]
        sound = max(n for n in range(len(tokens) + 1) if tokens[:n] in self.proved)
        self.pages.give_back(self.cache.forget(player.prefix))
        after = self.closure()
        assert after <= before
        for known in after:
            if len(known) > sound and known[: sound + 1] == tokens[: sound + 1]:
                assert self._is_held(known), "what nothing proved is still there"
        least = sound // self.size * self.size
        assert all(t not in self.proved or len(t) > least for t in before - after), "it dropped what is sound"
        self.proved &= after
        if self.store is not None and tokens:
            self._revive(tokens, len(tokens), "")
            back = self.closure() - after  # what was proved before it left for the store may come back
            assert all(len(t) <= sound or t in self.proved_once for t in back), "the store brings it back"

    def _is_held(self, known: Tokens) -> bool:
        """Some player's lock holds these tokens, or the page in which it ends."""
        for player in self.players:
            end = player.prefix.lock.position
            up = -(-end // self.size) * self.size
            if len(known) <= up and known[:end] == player.tokens[: len(known)][:end]:
                return True
        return False

    def _leave(self, player: Player, num_handed: int) -> None:
        self.players.remove(player)
        self.pages.give_back(player.pages[num_handed:])
        for checkpoint in player.saved:
            self.cache.discard(checkpoint)
        if player.unit:
            self.units.give_back([player.unit])

    def make_room(self, count: int) -> bool:
        if count > self.pages.num_free:
            self.evict(count - self.pages.num_free)
        return count <= self.pages.num_free

    def evict(self, count: int) -> None:
        before, cut = self.closure(), self.useless()
        freed = self.cache.evict(count)
        self.pages.give_back(freed)
        after = self.closure()
        self.proved &= after
        assert after <= before, "an eviction adds nothing"
        for player in self.players:
            lock = player.prefix.lock
            assert player.tokens[: lock.position] in after, "a locked prefix was evicted"
        if len(freed) < count:
            assert self.cache.num_pages <= self.cache.pinned_pages(), "it gave up too early"
        elif len(freed) == count == 1 and cut and not (before - after) & cut:
            raise AssertionError("something useful went before what cannot be resumed")

    # --- what the model knows ---

    def paths(self) -> list[tuple[Tokens, set[int]]]:
        """Every leaf's tokens and the positions of its checkpoints."""
        out = []
        for node in self.cache.tree.nodes():
            if node.children:
                continue
            tokens: Tokens = ()
            marks: set[int] = set()
            while node is not None:
                tokens = (*(int(t) for t in node.tokens), *tokens)
                marks |= set(self.checkpoints.marks(node)) if self.checkpoints else set()
                node = node.parent
            out.append((tokens, marks))
        return out

    def closure(self) -> set[Tokens]:
        return {tokens[:n] for tokens, _ in self.paths() for n in range(len(tokens) + 1)} | {()}

    def _proved_by_the_tree(self) -> set[Tokens]:
        out: set[Tokens] = {()}
        for node in self.cache.tree.nodes():
            tokens = tuple(int(t) for n in _way(node) for t in n.tokens)
            out |= {tokens[:n] for n in range(node.start + 1, node.proved + 1)}
        return out

    def useless(self) -> set[Tokens]:
        """Prefixes on whole unlocked pages of leaves, behind every checkpoint and lock."""
        if not self.checkpoints:
            return set()
        held = {p.tokens[: p.prefix.lock.position] for p in self.players}
        out: set[Tokens] = set()
        for tokens, marks in self.paths():
            branch = max((len(t) for t in self._branches(tokens)), default=0)
            locked = max((n for n in range(len(tokens) + 1) if tokens[:n] in held), default=0)
            inside = max([locked, *marks])
            useful = -(-inside // self.size) * self.size if inside > branch else branch
            out |= {tokens[:n] for n in range(useful + 1, len(tokens) + 1)}
        return out

    def _branches(self, tokens: Tokens) -> list[Tokens]:
        """Prefixes of `tokens` where another path leaves it."""
        others = [other for other, _ in self.paths() if other != tokens]
        return [tokens[: sum(_same(tokens, other))] for other in others]

    def _check_match(self, tokens: Tokens, prefix: Prefix) -> None:
        known = max(n for n in range(len(tokens) + 1) if tokens[:n] in self.closure())
        assert prefix.num_matched == known, "the match is not the longest"
        limit = min(known, len(tokens) - 1)
        if self.checkpoints:
            marks = {(path[:m]) for path, at in self.paths() for m in at}
            limit = max((n for n in range(1, limit + 1) if tokens[:n] in marks), default=0)
        assert prefix.num_tokens == limit, "it does not resume where it could"
        assert len(prefix.page_ids) == limit // self.size

    def check(self) -> None:
        self.cache.check()
        assert self._proved_by_the_tree() == self.proved, "the tree proves more, or less"
        self.pages.check()
        self.units.check()
        own = [p for player in self.players for p in player.pages[player.shared :]]
        assert len(own) == len(set(own)) and len(own) + self.cache.num_pages == self.pages.num_used
        assert self.units.num_used == len(self.players) + self.cache.num_units, "a unit leaks"
        if self.checkpoints:
            for checkpoint in self.checkpoints._slot_of.values():
                assert (checkpoint.unit, checkpoint.slot) != (-1, -1)


def _way(node) -> list:
    """Nodes from below the root to this one."""
    out = []
    while node.parent is not None:
        out.append(node)
        node = node.parent
    return out[::-1]


def _same(a: Tokens, b: Tokens) -> list[bool]:
    out = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        out.append(True)
    return out


def random_tokens(rng: random.Random, world: World, longest: int = 30) -> Tokens:
    """Often a known prefix with another end, so that sharing, splits and partial pages are common."""
    length = rng.randrange(1, longest)
    fresh = tuple(rng.randrange(3) for _ in range(length))
    pool = [p.tokens for p in world.players] + [tokens for tokens, _ in world.paths()]
    if not pool or rng.random() < 0.2:
        return fresh
    base = rng.choice(pool)
    cut = rng.randrange(len(base) + 1)
    return (*base[:cut], *fresh)[:longest] or fresh


def act(rng: random.Random, world: World) -> None:
    """One random operation."""
    players = world.players
    kind = rng.random()
    group = rng.choice("abc")
    if kind < 0.25 and len(players) < 6:
        again = world.store is not None and world.seen and rng.random() < 0.5
        world.arrive(rng.choice(world.seen) if again else random_tokens(rng, world), group)
    elif kind < 0.5 and players:
        world.compute(rng.choice(players), rng.randrange(1, 9))
    elif kind < 0.62 and players:
        world.save(rng.choice(players), group)
    elif kind < 0.7 and players:
        world.commit(rng.choice(players))
    elif kind < 0.76 and players:
        world.prove(rng.choice(players))
    elif kind < 0.84 and players:
        world.finish(rng.choice(players), donate=rng.random() < 0.5)
    elif kind < 0.88 and players:
        world.fail(rng.choice(players))
    elif kind < 0.94:
        world.evict(rng.choice([1, 1, 2, 7]))
        if world.store is not None and rng.random() < 0.1:
            world.store.damage()
    else:
        world.mover.advance(rng.randrange(3))
