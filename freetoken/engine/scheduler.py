"""What runs next: admission, shares of the token budget, growth, preemption. Integers only.

Owns the live requests and the page, state and row allocators. Knows no tensor and no clock.
Invariants: a request holds pages for exactly the tokens it has computed or is about to;
`check()` proves that every unit is free or owned once.

Admission asks for what a prompt needs beyond what the prefix cache has, never for max_tokens. The oldest
request always makes progress: when pages run out, the newest one that may be stopped gives its pages back
and waits; what it computed stays in the cache as long as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from freetoken.cache.pages import UnitAllocator
from freetoken.core.errors import CapacityError
from freetoken.core.prefix import Prefix
from freetoken.core.request import FinishReason, Request
from freetoken.core.units import ceil_div
from freetoken.engine.reuse import Reuse


@dataclass(frozen=True)
class Work:
    """`num_tokens` of one request from position `start`; logits are wanted at the prompt's end.

    saves  (position, state unit) pairs: where the state shall be written on the way
    """

    request: Request
    start: int
    num_tokens: int
    wants_logits: bool
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Schedule:
    """One step: rows of a mixed batch, and the macro-chunk that should become a PrefillJob."""

    batch: tuple[Work, ...] = ()
    job: tuple[Work, ...] = ()


@dataclass(frozen=True)
class Limits:
    """max_running requests, prefill tokens a step, tokens of a job, tokens a page, context tokens."""

    max_running: int
    chunk_tokens: int
    macro_tokens: int
    page_size: int
    max_model_len: int


class GrowPages(Protocol):
    def __call__(self, pages: int, *, spare: bool = False) -> bool: ...


def never(pages: int, *, spare: bool = False) -> bool:
    """A pool that does not grow."""
    return False


class NeedsSync(Exception):
    """Preemption is due, but sampled tokens are still in flight."""


def share(budget: int, wants: Sequence[int]) -> list[int]:
    """Split `budget` fairly: everyone gets an equal part, what one does not need goes to the others.

    The earliest get the remainder, so a budget smaller than the crowd still serves in order.
    """
    out = [0] * len(wants)
    open_ = [i for i, want in enumerate(wants) if want > 0]
    while budget > 0 and open_:
        part = max(budget // len(open_), 1)
        for i in open_[:budget]:
            got = min(wants[i] - out[i], part)
            out[i] += got
            budget -= got
        open_ = [i for i in open_ if out[i] < wants[i]]
    return out


class Scheduler:
    """Decides each step. `reuse` owns pages and states and knows what is computed already;
    `wants_job(tokens)` says whether a prefill should run layer by layer;
    `grow_pages(n, spare)` may enlarge the page pool by at least n pages, and says whether it did; `spare`:
    only at the cost of what is worth less than cached prefixes."""

    def __init__(
        self,
        limits: Limits,
        reuse: Reuse,
        wants_job: Callable[[int], bool] = lambda tokens: False,
        grow_pages: GrowPages = never,
    ) -> None:
        self.limits = limits
        self.reuse = reuse
        self.pages, self.states = reuse.pages, reuse.states
        self.rows = UnitAllocator("batch rows", limits.max_running + 1)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._job: tuple[Work, ...] = ()
        self.refused: list[Request] = []
        self.num_preemptions = 0
        self.wants_job = wants_job
        self._grow_pages = grow_pages

    # --- arrivals and departures ---

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def release(self, request: Request, reason: FinishReason) -> None:
        """End a request: give back what it holds. Idempotent. Not for members of a running job."""
        if request.finish is not None:
            return
        request.finish = reason
        if request in self.running:
            self.running.remove(request)
            self._give_back(request, keep=reason is not FinishReason.ERROR)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _give_back(self, request: Request, *, keep: bool) -> None:
        self.reuse.leave(request, keep=keep)
        if request.row >= 0:
            self.rows.give_back([request.row])
            request.row = -1

    def preempt(self, request: Request) -> None:
        """Take everything from a running request; what the cache keeps, it need not compute again."""
        self.running.remove(request)
        self._give_back(request, keep=True)
        request.num_computed = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def halve_chunks(self) -> bool:
        """Prefill in steps of half the size from now on; False at a page."""
        half = self.limits.chunk_tokens // 2
        if half < self.limits.page_size:
            return False
        macro = max(self.limits.macro_tokens // 2, half)
        self.limits = replace(self.limits, chunk_tokens=half, macro_tokens=macro)
        return True

    def retry(self, works: Sequence[Work]) -> None:
        """These were scheduled and never ran whole: their requests wait again, the oldest first."""
        for work in sorted(works, key=lambda w: w.request.number, reverse=True):
            request = work.request
            if request in self.running:
                request.num_computed = work.start
                self.reuse.step_dropped(request)
                self.preempt(request)

    # --- one step ---

    def schedule(self, *, in_flight: bool, job_active: bool) -> Schedule:
        """Choose the step's work and advance `num_computed`.

        in_flight   a sampled step is not yet read: NeedsSync is raised where preemption is due.
        """
        self._admit()
        decodes = self._grown_decodes(in_flight)
        prefills = [r for r in self.running if self._is_prefill(r) and r.id not in self.in_job]
        jobs = [r for r in prefills if self.wants_job(r.num_tokens - r.num_computed)]
        riders = [r for r in prefills if r not in jobs]
        parts = self._grown_prefills(riders, self.limits.chunk_tokens, in_flight)
        job_parts = {} if job_active else self._grown_prefills(jobs, self.limits.macro_tokens, in_flight)
        batch = [self._work(r, 1) for r in decodes if r in self.running]
        batch += [self._work(r, n) for r, n in parts.items() if r in self.running]
        for work in batch:
            work.request.num_computed += work.num_tokens
        job = tuple(self._work(r, n) for r, n in job_parts.items() if r in self.running)
        if job:
            self._job = job
        return Schedule(tuple(batch), job)

    @property
    def in_job(self) -> set[str]:
        """Requests whose macro-chunk is under way: not yet computed, not to be touched."""
        return {w.request.id for w in self._job}

    def job_ended(self, *, committed: bool) -> None:
        """The macro-chunk is the commit unit: its tokens count from here on, or never did."""
        for work in self._job:
            request = work.request
            if request.finish is not None:
                continue
            if not committed:
                self.reuse.step_dropped(request)
                continue
            request.num_computed += work.num_tokens
            self.reuse.launched(request)
            if request.num_computed < request.num_prompt:
                self.reuse.commit(request, request.num_computed)
        self._job = ()

    def launched(self, works: Iterable[Work]) -> None:
        """The forward of a step is enqueued. What it computes of a long prompt can be used at once."""
        for work in works:
            request = work.request
            self.reuse.launched(request)
            if work.num_tokens > 1 and request.num_computed < request.num_prompt and request in self.running:
                self.reuse.commit(request, request.num_computed)

    def _is_prefill(self, request: Request) -> bool:
        """More than the newest token is uncomputed: a prompt, or a preempted request coming back."""
        return request.num_tokens - request.num_computed > 1 or request.num_computed < request.num_prompt

    def wants_token(self, request: Request) -> bool:
        """False once the next draw would pass max_tokens or the context's end."""
        total = request.num_tokens + request.num_pending
        return total - request.num_prompt < request.params.max_tokens and total < self.limits.max_model_len

    def _grown_decodes(self, in_flight: bool) -> list[Request]:
        """Running requests with one token to compute, each with room for it; may preempt."""
        ready: list[Request] = []
        for request in sorted(self.running, key=lambda r: r.number):
            busy = request.id in self.in_job or self._is_prefill(request)
            if request not in self.running or busy or not self.wants_token(request):
                continue
            if self._ensure_pages(request, request.num_computed + 1, in_flight):
                ready.append(request)
        return ready

    def _grown_prefills(self, requests: list[Request], budget: int, in_flight: bool) -> dict[Request, int]:
        """Shares of the budget, each with pages; oldest first, so the oldest always gets through."""
        requests = sorted(requests, key=lambda r: r.number)
        parts = share(budget, [r.num_tokens - r.num_computed for r in requests])
        ready = {}
        for request, n in zip(requests, parts, strict=True):
            if (
                n
                and request in self.running
                and self._ensure_pages(request, request.num_computed + n, in_flight)
            ):
                ready[request] = n
        return ready

    def _work(self, request: Request, num_tokens: int) -> Work:
        end = request.num_computed + num_tokens
        done = end == request.num_tokens + request.num_pending
        saves = self.reuse.saves_of(request, request.num_computed, num_tokens)
        return Work(request, request.num_computed, num_tokens, done, saves)

    # --- memory ---

    def _pages_short(self, request: Request, tokens: int) -> int:
        return max(0, ceil_div(tokens, self.limits.page_size) - len(request.page_ids))

    def _take_pages(self, request: Request, tokens: int) -> None:
        request.page_ids.extend(self.pages.take(self._pages_short(request, tokens)))

    def _promised(self) -> int:
        """Pages that admitted prompts still need for tokens they already have."""
        return sum(self._pages_short(r, r.num_tokens) for r in self.running)

    def _admit(self) -> None:
        """Let waiting requests in, oldest first, while rows, states and pages last.

        Those that share the beginning of a running prefill wait for it to be committed.
        """
        while self.waiting and self.rows.num_free and self._have_state():
            request = next((r for r in self.waiting if not self.reuse.awaits(r, self.running)), None)
            if request is None:
                return
            prefix = self._find_room(request)
            if prefix is None and self.running:
                return
            self.waiting.remove(request)
            if prefix is None:
                self._refuse(request, ceil_div(request.num_tokens + 1, self.limits.page_size))
                continue
            request.row = self.rows.take(1)[0]
            request.state_id = self.states.take(1)[0] if self.states.num_units > 1 else 0
            self.reuse.enter(request, prefix)
            self.running.append(request)

    def _have_state(self) -> bool:
        """A state unit is free, or a copy gives one up."""
        if self.states.num_units == 1 or self.states.num_free:
            return True
        return self.reuse.cache.yield_unit(wait=not self.running)

    def _find_room(self, request: Request) -> Prefix | None:
        """What the cache has for the request, locked, if there is room for the rest of it."""
        need = ceil_div(request.num_tokens + 1, self.limits.page_size) + self._promised()
        prefix = self.reuse.match(request)
        if self._have_pages(need - len(prefix.page_ids)):
            if not self.reuse.revive(request):
                return prefix
            self.reuse.cache.release(prefix)
            prefix = self.reuse.match(request)
            if self._have_pages(need - len(prefix.page_ids)):
                return prefix
        self.reuse.cache.release(prefix)
        if self.running or not self._have_pages(need):
            return None
        return self.reuse.match_nothing()

    def _have_pages(self, count: int) -> bool:
        """Make `count` pages free. What can't succeed doesn't cost the cache anything."""
        cache, short = self.reuse.cache, count - self.pages.num_free
        if short <= 0:
            return True
        if short > 1:
            lacking = short - (cache.num_pages - cache.pinned_pages())
            if lacking > 0 and not self._grow_pages(lacking):
                return False
        if not self._grow_pages(count - self.pages.num_free, spare=True):
            self.pages.give_back(cache.evict(count - self.pages.num_free))
        return count <= self.pages.num_free or self._grow_pages(count - self.pages.num_free)

    def _refuse(self, request: Request, need: int) -> None:
        request.finish = FinishReason.ERROR
        request.error = CapacityError(
            f"The prompt needs {need} KV pages of {self.limits.page_size} tokens; "
            f"the pool has {self.pages.num_units - 1}.",
            code="kv_too_small",
            hint="Raise --num-tokens or --gpu-memory, or shorten the prompt.",
        )
        self.refused.append(request)

    def _ensure_pages(self, request: Request, tokens: int, in_flight: bool) -> bool:
        """Give `request` pages for `tokens`, stopping newer requests if it must."""
        short = self._pages_short(request, tokens)
        while not self._have_pages(short):
            if in_flight:
                raise NeedsSync
            victim = self._victim()
            if victim is None:
                return False
            self.preempt(victim)
            if victim is request:
                return False
        self._take_pages(request, tokens)
        return True

    def _victim(self) -> Request | None:
        candidates = [r for r in self.running if r.id not in self.in_job and r.page_ids]
        return max(candidates, key=lambda r: r.number, default=None)

    def moved(self, pages: dict[int, int]) -> None:
        """Rename pages after the pool relocated them."""
        self.reuse.cache.moved(pages)
        for request in self.running:
            request.page_ids[:] = [pages.get(p, p) for p in request.page_ids]

    def check(self, extra: Iterable[Request] = ()) -> None:
        """Raise AssertionError unless each unit is free or owned exactly once."""
        for allocator in (self.pages, self.states, self.rows):
            allocator.check()
        owners = [*self.running, *extra]
        pages = [p for r in owners for p in r.page_ids[r.num_shared :]]
        cached = self.reuse.cache.num_pages
        assert len(pages) == len(set(pages)) == self.pages.num_used - cached, "pages leak or are shared"
        assert self.rows.num_used == len(owners), "rows leak"
        states = sum(r.state_id > 0 for r in owners) + self.reuse.cache.num_units
        assert self.states.num_used == states, "states leak"
        for request in self.waiting:
            assert not request.page_ids and request.row < 0, "a waiting request holds units"

    @property
    def holds_nothing(self) -> bool:
        """True if no request owns a unit: all that is in use is the prefix cache's."""
        cache = self.reuse.cache
        used = (self.pages.num_used, self.states.num_used, self.rows.num_used)
        return used == (cache.num_pages, cache.num_units, 0)

    def shrink_cache(self, num_pages: int) -> None:
        """Make the used pages fit a pool of `num_pages`, as far as what runs allows it."""
        over = self.pages.num_used - (num_pages - 1)
        if over > 0:
            self.pages.give_back(self.reuse.cache.evict(over))
