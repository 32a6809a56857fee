"""Between requests and the prefix cache: what a request starts with, and what it leaves behind.

Owns the order of handing pages and states over; policy is the cache's, bytes are the mover's. Integers
only. Invariants: the first `num_shared` pages of a request are the cache's and never written; a state goes
to the cache as a copy, or for good once its request has left; nothing is handed over whose tokens the
host doesn't know.

Under run-ahead the state is one token ahead of what the host has read: it has just taken in the newest
token. So the state behind a generated anchor is copied between reading that token and the next launch,
and needs neither a predicate on the device nor a pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from freetoken.cache.anchors import choose, positions_to_save
from freetoken.cache.pages import UnitAllocator
from freetoken.core.prefix import Checkpoint, Prefix, PrefixCache, UnitMover
from freetoken.core.request import Request

MIN_SHARED = 32
"""Tokens of a running prefill that are worth waiting for."""


class Reuse:
    """pages, states: the scheduler's allocators, which say who owns what the cache does not.

    captures  False: no state is saved from now on, which tells a bench what saving costs
    """

    def __init__(
        self,
        cache: PrefixCache,
        pages: UnitAllocator,
        states: UnitAllocator,
        mover: UnitMover,
        page_size: int,
    ) -> None:
        self.cache, self.pages, self.states = cache, pages, states
        self.mover, self.page_size = mover, page_size
        self.captures = True
        self.num_lookups = self.num_hits = self.num_returned = self.cached_tokens = 0

    # --- coming in ---

    def match(self, request: Request) -> Prefix:
        """What is there already; at least one token is left to compute. Locked."""
        return self.cache.match(request.tokens, request.num_tokens - 1, request.submit.group)

    def revive(self, request: Request) -> bool:
        """Bring back what left the device of its beginning, into free pages. True if anything came."""
        ids, limit, group = request.tokens, request.num_tokens - 1, request.submit.group
        came, back = self.cache.revive(ids, limit, group, self._free_pages)
        self.pages.give_back(back)
        return came

    def _free_pages(self, count: int) -> Sequence[int] | None:
        return self.pages.take(count) if count <= self.pages.num_free else None

    def match_nothing(self) -> Prefix:
        """A lock on no tokens, for a request that has to be computed from its beginning."""
        return self.cache.match(np.empty(0, np.int32), 0)

    def enter(self, request: Request, prefix: Prefix) -> None:
        """Take a match over into a request that has its state unit; one free page may be needed."""
        request.prefix = prefix
        request.page_ids = list(prefix.page_ids)
        request.num_shared = len(request.page_ids)
        request.num_computed = prefix.num_tokens
        if prefix.tail_page >= 0:
            page = self.pages.take(1)[0]
            self.mover.copy_page(prefix.tail_page, page)
            request.page_ids.append(page)
        if prefix.checkpoint is not None:
            self.cache.restore(prefix, request.state_id)
        self.num_lookups += 1
        self.num_hits += prefix.num_tokens > 0
        self.cached_tokens += prefix.num_tokens
        if request.preemptions:
            self.num_returned += prefix.num_tokens > 0
        else:
            request.num_cached = prefix.num_tokens
            request.num_matched = prefix.num_matched
        request.save_positions = []
        if self._wants_states():
            anchors = [*request.submit.anchor_positions, prefix.num_matched]
            request.save_positions = positions_to_save(
                anchors, prefix.num_tokens, request.num_tokens, self.page_size
            )

    def awaits(self, request: Request, running: Sequence[Request]) -> bool:
        """True while an older request is computing a beginning that this one shares."""
        if not self.cache.keeps:
            return False
        leader = request.leader
        if leader is not None and (
            leader not in running or leader.num_output or leader.prefix.num_tokens >= request.leads_to
        ):
            leader = request.leader = None
        if leader is None:
            leader = request.leader = next((r for r in running if self._leads(r, request)), None)
        return leader is not None

    def _leads(self, leader: Request, request: Request) -> bool:
        if leader.num_output or leader.number > request.number:
            return False
        n = min(leader.num_prompt, request.num_tokens - 1)
        differs = leader.token_ids[:n] != request.token_ids[:n]
        shared = int(differs.argmax()) if differs.any() else n
        if self._wants_states():
            worth = shared - leader.prefix.num_tokens >= MIN_SHARED and shared > leader.num_computed
            if worth and shared not in leader.save_positions:
                leader.save_positions = sorted([*leader.save_positions, shared])
            saved = [c.position for c in leader.saved] + leader.save_positions
            shared = max((p for p in saved if p <= shared), default=0)
        if shared - leader.prefix.num_tokens < MIN_SHARED:
            return False
        mine = self.match(request)
        self.cache.release(mine)
        request.leads_to = shared // self.page_size * self.page_size
        return shared - mine.num_tokens >= MIN_SHARED

    # --- states on the way ---

    def _wants_states(self) -> bool:
        return self.captures and self.cache.wants_states()

    def saves_of(self, request: Request, start: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """(position, unit) that the forward over these tokens shall write; called once per work."""
        end = start + num_tokens
        due = list(takewhile(lambda p: p <= end, request.save_positions))
        if not due:
            return ()
        del request.save_positions[: len(due)]
        if num_tokens == 1:
            request.save_at = end if due[-1] == end else -1
            return ()
        room = self.cache.num_reservable()
        due = choose([p for p in due if p > start], start, request.num_tokens, room)
        made = [c for c in (self.cache.reserve(p, request.submit.group) for p in due) if c is not None]
        request.saved += made
        return tuple((c.position, c.unit) for c in made)

    def launched(self, request: Request) -> None:
        """A forward over all `num_computed` tokens is enqueued: states on the way can be stowed."""
        for checkpoint in request.saved:
            if checkpoint.position <= request.num_computed:
                self.cache.stow(checkpoint)
        self.save_due(request)

    def save_due(self, request: Request) -> None:
        """Copy the state if it stands exactly where it was wanted."""
        if request.save_at < 0 or request.num_computed < request.save_at or request.state_id <= 0:
            return
        position, request.save_at = request.save_at, -1
        if position == request.num_computed and not _is_near(position, request.saved):
            checkpoint = self.cache.reserve(position, request.submit.group)
            if checkpoint is not None:
                self.mover.copy_state(request.state_id, checkpoint.unit)
                self.cache.stow(checkpoint)
                request.saved.append(checkpoint)

    def note_anchor(self, request: Request) -> None:
        """The newest token closes or opens a block: its state is worth saving."""
        if self._wants_states() and request.finish is None:
            request.save_at = request.num_tokens
            self.save_due(request)

    # --- handing over ---

    def commit(self, request: Request, num_tokens: int) -> None:
        """Give the cache what a running request has computed; it goes on in its own partial page.

        Checkpoints in that page go along with a copy of it, so that others can resume there.
        """
        tail, rest = -1, num_tokens % self.page_size
        last = num_tokens - rest
        if rest and self.pages.num_free and any(last < c.position <= num_tokens for c in request.saved):
            tail = self.pages.take(1)[0]
            self.mover.copy_page(request.page_ids[num_tokens // self.page_size], tail)
        self._commit(request, num_tokens, tail)
        self._prove(request)

    def leave(self, request: Request, *, keep: bool) -> None:
        """Everything back: computed tokens and states to the cache if they are to be kept."""
        computed = min(request.num_computed, request.num_tokens)
        if keep and computed:
            self._donate_state(request, computed)
            whole, rest = divmod(computed, self.page_size)
            self._commit(request, computed, request.page_ids[whole] if rest else -1)
            self._prove(request)
            self.pages.give_back(request.page_ids[request.num_shared : whole])
            self.pages.give_back(request.page_ids[whole + (rest > 0) :])
            self.cache.release(request.prefix)
        else:
            self.pages.give_back(request.page_ids[request.num_shared :])
            self.pages.give_back(self.cache.forget(request.prefix))
        for checkpoint in request.saved:
            self.cache.discard(checkpoint)
        request.saved.clear()
        request.page_ids.clear()
        request.prefix, request.num_shared, request.save_at = Prefix(), 0, -1
        request.state_broken = False
        if request.state_id > 0:
            self.states.give_back([request.state_id])
        request.state_id = -1

    def step_dropped(self, request: Request) -> None:
        """Its forward, a step's or a job's, ended half way: what lies behind `num_computed` is not whole."""
        request.state_broken = True
        for checkpoint in [c for c in request.saved if c.position > request.num_computed]:
            request.saved.remove(checkpoint)
            self.cache.discard(checkpoint)

    def clear(self) -> None:
        """Forget everything that no running request holds, counters too."""
        self.pages.give_back(self.cache.clear())
        self.num_lookups = self.num_hits = self.num_returned = self.cached_tokens = 0

    def snapshot(self) -> dict[str, int]:
        """Counters for /v1/stats."""
        own = {
            "lookups": self.num_lookups,
            "hits": self.num_hits,
            "hits_after_preemption": self.num_returned,
            "cached_tokens": self.cached_tokens,
        }
        return own | self.cache.snapshot()

    def _commit(self, request: Request, num_tokens: int, tail: int) -> None:
        tokens = request.tokens[:num_tokens]
        request.prefix, done = self.cache.commit(request.prefix, tokens, request.page_ids, tail)
        request.page_ids[done.first : done.first + len(done.page_ids)] = done.page_ids
        request.num_shared = max(request.num_shared, done.first + len(done.page_ids))
        self.pages.give_back(done.freed)
        if request.saved:
            end = num_tokens if tail >= 0 else num_tokens // self.page_size * self.page_size
            ready = [c for c in request.saved if c.position <= end]
            request.saved = [c for c in request.saved if c.position > end]
            self.cache.attach(request.prefix, ready)

    def _prove(self, request: Request) -> None:
        """All tokens but the newest have an answer behind them, once there is one."""
        if request.num_output:
            self.cache.prove(request.prefix, request.num_tokens - 1)

    def _donate_state(self, request: Request, computed: int) -> None:
        """The state behind the last computed token; nobody writes it any more."""
        wanted = self._wants_states() and request.state_id > 0 and not request.state_broken
        if not wanted or _is_near(computed, request.saved):
            return
        checkpoint = self.cache.adopt(computed, request.submit.group, request.state_id)
        if checkpoint is not None:
            request.state_id = -1
            request.saved.append(checkpoint)
            self.cache.stow(checkpoint)


def _is_near(position: int, saved: Sequence[Checkpoint]) -> bool:
    """A checkpoint one or two tokens back is as good."""
    return any(position - 3 < c.position <= position for c in saved)
