"""Tokenises a prompt piece by piece between control tokens, and remembers the pieces.

An agent sends its whole history again each turn; only what is new is tokenised. Knows no template.
Invariant: the ids are those of one call over the whole text. Whether a tokenizer allows that is tried out
once (`is_separable`): some add a space to the first piece, or let an added token eat its neighbour's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from freetoken.chat.tokenizer import IntArray, Tokenizer

MAX_BYTES = 48 << 20
ENTRY_BYTES = 320
"""What a piece takes beside its text and its ids: short pieces count, too."""
PROBES = (" a b", "x", "\n", "\n\n  def f(x):\n", "7 + 8", "\u00e9\U0001f600", "\u0338z", "  ", "A")


class SegmentMemo:
    """Ids of text pieces, most recently used ones kept. Safe from any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_hits = self.num_misses = 0
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._ids: OrderedDict[tuple[str, bool], IntArray] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, broken: bool, encode: Callable[[str], IntArray]) -> IntArray:
        """The ids of one piece. `broken`: it quotes control text, so another tokenizer reads it."""
        key = (text, broken)
        with self._lock:
            found = self._ids.get(key)
            if found is not None:
                self.num_hits += 1
                self._ids.move_to_end(key)
                return found
            self.num_misses += 1
        ids = encode(text)
        with self._lock:
            if key not in self._ids and _bytes_of(text, ids) <= self.max_bytes:
                self._ids[key] = ids
                self.num_bytes += _bytes_of(text, ids)
            while self.num_bytes > self.max_bytes:
                (old, _), its_ids = self._ids.popitem(last=False)
                self.num_bytes -= _bytes_of(old, its_ids)
        return ids


def _bytes_of(text: str, ids: IntArray) -> int:
    return len(text) * (1 if text.isascii() else 4) + ids.nbytes + ENTRY_BYTES


def is_separable(tokenizer: Tokenizer, control: Sequence[str]) -> bool:
    """True if text on one side of a control token never changes the ids on the other side."""
    others = [token.text for token in tokenizer.added if token.text not in control]
    if any(_overlap(other, text) for other in others for text in control):
        return False
    for text in control:
        id_ = tokenizer.id_of(text)
        if id_ is None:
            return False
        parts = [tokenizer.encode(probe) for probe in PROBES]
        marked = [np.concatenate([part, np.array([id_], np.int32)]) for part in parts]
        whole = tokenizer.encode("".join(probe + text for probe in PROBES))
        if not np.array_equal(np.concatenate(marked), whole):
            return False
    return True


def _overlap(other: str, control: str) -> bool:
    """Another added token that could swallow a part of a control text."""
    heads = (control[:n] for n in range(1, len(control)))
    return control in other or any(other.endswith(head) for head in heads)
