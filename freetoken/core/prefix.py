"""Contract of the prefix cache: which computed tokens can be used again. Integers only; torch-free.

    Prefix        what a cache can give one request, and the lock on it
    Checkpoint    a saved recurrent state: where it stands and where its bytes lie
    PrefixCache   match, commit, evict; save and restore states
    ColdStore     pages and states that left the device, found again by what they hold
    UnitMover     carries a cache's orders out: the only one who touches bytes

Invariant: pages that a cache owns are never written again. A request computes into its own pages; the
last, partial page of a match is copied before the request writes behind it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
PageSource = Callable[[int], "Sequence[int] | None"]
"""Gives so many free device pages, or None and none."""


def num_common(a: IntArray, b: IntArray) -> int:
    """Length of the common prefix of two int arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


class Checkpoint:
    """The recurrent state behind the first `position` tokens of some sequence.

    unit   place in the device's state pool, -1 = not there
    slot   place in host memory, -1 = not there
    group  the conversation that pays for it
    place  the tree's own; None until it is attached
    """

    __slots__ = ("group", "level", "place", "position", "slot", "unit")

    def __init__(self, position: int, group: str, unit: int) -> None:
        self.position, self.group, self.unit = position, group, unit
        self.slot = -1
        self.level = 0.0
        self.place: Any = None


@dataclass(frozen=True)
class Prefix:
    """What a cache gives a prompt.

    num_tokens   tokens that need not be computed
    page_ids     their whole pages, owned by the cache: read only
    tail_page    a page whose first num_tokens % page_size tokens are the rest; copy it (-1: none)
    checkpoint   the state to restore, None where no state is needed
    num_matched  tokens that the cache knows, resumable or not (>= num_tokens)
    lock         keeps all of it from eviction until `release`
    """

    num_tokens: int = 0
    page_ids: tuple[int, ...] = ()
    tail_page: int = -1
    checkpoint: Checkpoint | None = None
    num_matched: int = 0
    lock: Any = None


@dataclass(frozen=True)
class Committed:
    """Outcome of a commit.

    first     index of the first page in question; the ones before it were the cache's already
    page_ids  the cache's pages from `first` on: the caller's own, or others with the same tokens
    freed     pages that the caller owned and nobody needs now
    """

    first: int
    page_ids: Sequence[int]
    freed: Sequence[int]


class UnitMover(abc.ABC):
    """Moves KV pages and states in the order of the calls; what runs later sees the result.

    saved_bytes, loaded_bytes  of states, to and from host memory
    """

    saved_bytes: int = 0
    loaded_bytes: int = 0

    @abc.abstractmethod
    def copy_page(self, src: int, dst: int) -> None: ...

    @abc.abstractmethod
    def copy_state(self, src: int, dst: int) -> None: ...

    @abc.abstractmethod
    def save_state(self, unit: int, slot: int) -> None:
        """Start copying a device unit to a host slot; the unit must stay as it is until `is_saved`."""

    @abc.abstractmethod
    def load_state(self, slot: int, unit: int) -> None:
        """Copy a host slot to a device unit."""

    @abc.abstractmethod
    def is_saved(self, unit: int) -> bool:
        """True if no copy reads this unit any more. Never waits."""

    @abc.abstractmethod
    def wait_saved(self, unit: int) -> None:
        """Let what runs next wait until `is_saved`."""

    def close(self) -> None:
        """Nothing is moved any more. Idempotent."""


class NoMover(UnitMover):
    """For schedulers without memory: every order is carried out at once, on nothing."""

    def copy_page(self, src: int, dst: int) -> None:
        """Nothing there to copy."""

    def copy_state(self, src: int, dst: int) -> None:
        """Nothing there to copy."""

    def save_state(self, unit: int, slot: int) -> None:
        """Nothing there to copy."""

    def load_state(self, slot: int, unit: int) -> None:
        """Nothing there to copy."""

    def is_saved(self, unit: int) -> bool:
        return True

    def wait_saved(self, unit: int) -> None:
        """Nothing there to wait for."""


class ColdStore(abc.ABC):
    """Pages and states beyond the device's memory.

    A place is named by what led there: `key` is a digest of all whole pages of tokens before it, `rest` the
    bytes of the tokens behind them (b"" at a page's end).
    """

    @property
    def lasts(self) -> bool:
        """Whether anything survives a stop."""
        return False

    @abc.abstractmethod
    def has_page(self, key: bytes, rest: bytes) -> bool: ...

    @abc.abstractmethod
    def rests(self, key: bytes) -> Collection[bytes]:
        """The rests behind `key` at which states are kept."""

    @abc.abstractmethod
    def put_page(self, key: bytes, rest: bytes, page: int) -> None:
        """Keep a copy of a device page, which must stay as it is until `carry_out`."""

    @abc.abstractmethod
    def put_state(self, key: bytes, rest: bytes, slot: int) -> None:
        """Keep a copy of a state in host memory, which must stay as it is until `carry_out`."""

    @abc.abstractmethod
    def load_page(self, key: bytes, rest: bytes, page: int) -> bool:
        """Fill a device page; False, and it is gone, if what was kept is damaged."""

    @abc.abstractmethod
    def load_state(self, key: bytes, rest: bytes, slot: int) -> bool: ...

    @abc.abstractmethod
    def discard(self, key: bytes, rest: bytes) -> None:
        """Keep neither page nor state of a place: what they hold is not to be trusted."""

    def carry_out(self) -> None:
        """Start, as one batch, what was put and loaded since the last call.

        What runs next on the device comes after it. Stores that copy at once have nothing left to do.
        """

    def close(self) -> None:
        """Give up what is held; the device is at rest. Idempotent."""

    def flush(self) -> None:
        """Write down what shall survive an orderly stop."""

    def snapshot(self) -> dict[str, int]:
        return {}


class PrefixCache(abc.ABC):
    """Computed tokens that can be used again.

    A locked prefix moves forward with its request by `commit` and ends by `release` or `forget`. Its tokens
    are proved once a finite answer stood on them: not-a-numbers would have reached it.
    keeps  False: nothing committed will ever be matched
    """

    keeps: bool = True

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return 0

    @property
    def num_units(self) -> int:
        """Device state units that the cache and checkpoints on their way to it own."""
        return 0

    @property
    def num_slots(self) -> int:
        """States that the cache keeps in host memory."""
        return 0

    @abc.abstractmethod
    def match(self, token_ids: IntArray, limit: int, group: str = "") -> Prefix:
        """Longest prefix of at most `limit` tokens that can be resumed; locks it."""

    @abc.abstractmethod
    def commit(
        self, prefix: Prefix, token_ids: IntArray, page_ids: Sequence[int], tail_page: int = -1
    ) -> tuple[Prefix, Committed]:
        """Offer computed tokens with their pages; the lock moves to their end.

        token_ids  int32 [n], begins with what `prefix` locks
        page_ids   at least n // page_size pages, the request's page table
        tail_page  page of the last n % page_size tokens, handed over; without it they are left out
        """

    @abc.abstractmethod
    def release(self, prefix: Prefix) -> None: ...

    def prove(self, prefix: Prefix, num_tokens: int) -> None:
        """The first `num_tokens`, as far as the prefix locks them, gave a finite answer."""

    def forget(self, prefix: Prefix) -> Sequence[int]:
        """Release after a failure: of its path, drop what nothing has proved, with all that stands on it
        and nobody uses, wherever it is kept; returns pages."""
        self.release(prefix)
        return ()

    @abc.abstractmethod
    def evict(self, num_pages: int) -> Sequence[int]:
        """Give up at least `num_pages` pages if that many are unlocked, least valuable first."""

    def pinned_pages(self) -> int:
        """Pages that no eviction can free now."""
        return 0

    def moved(self, pages: Mapping[int, int]) -> None:
        """Rename pages after the pool relocated them."""

    def revive(
        self, token_ids: IntArray, limit: int, group: str, pages: PageSource
    ) -> tuple[bool, Sequence[int]]:
        """Bring back what left the device of this prompt's beginning.

        Returns whether anything came, and the pages of `pages` that were not needed.
        """
        return False, ()

    def flush(self) -> None:
        """Keep what can be kept beyond this process."""

    def close(self) -> None:
        """Free memory beyond the device; nothing is at work any more. Idempotent."""

    def clear(self) -> Sequence[int]:
        """Drop everything unlocked; returns the pages."""
        return self.evict(1 << 60)

    # --- recurrent states ---

    def wants_states(self) -> bool:
        """True if resuming needs checkpoints."""
        return False

    def num_reservable(self) -> int:
        """States that could be saved now."""
        return 0

    def reserve(self, position: int, group: str) -> Checkpoint | None:
        """A place on the device for a state about to be written; None if all are busy."""
        return None

    def yield_unit(self, *, wait: bool) -> bool:
        """Give a device unit back to the state pool for a request; `wait` for a copy if need be."""
        return False

    def adopt(self, position: int, group: str, unit: int) -> Checkpoint | None:
        """Take over a unit that holds a state nobody writes any more; None if there is no room."""
        return None

    def stow(self, checkpoint: Checkpoint) -> None:
        """The state is written (or enqueued): it may go to host memory."""

    def attach(self, prefix: Prefix, checkpoints: Sequence[Checkpoint]) -> None:
        """Hang checkpoints on the committed tokens that `prefix` locks; those behind its end are dropped."""

    def discard(self, checkpoint: Checkpoint) -> None:
        """Give up a checkpoint that was never attached."""

    def restore(self, prefix: Prefix, unit: int) -> None:
        """Copy the state of `prefix` into a unit that its owner may write."""

    def snapshot(self) -> dict[str, int]:
        """Plain numbers for /v1/stats."""
        return {}
