"""The prompts that were run lately, to say of a new one what was changed since.

Owns their token ids and checksums, no text, within a fixed number of prompts and tokens. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from freetoken.chat.prompt_edit import Asked

MAX_PROMPTS = 64
MAX_TOKENS = 4 << 20
"""Ids remembered, four bytes each."""


class PromptHistory:
    def __init__(self, max_prompts: int = MAX_PROMPTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_prompts, self._max_tokens = max_prompts, max_tokens
        self._asked: deque[Asked] = deque()
        self._num_tokens = 0
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def remember(self, asked: Asked) -> tuple[Asked, ...]:
        """Keep a prompt; the oldest give way, and those that it continues. Returns the ones before it."""
        with self._lock:
            earlier = tuple(self._asked)
            self._asked.append(asked)
            self._num_tokens += len(asked.ids)
            self._trim()
        return earlier

    def forget(self, asked: Asked) -> None:
        """A prompt was never computed after all."""
        with self._lock:
            if any(known is asked for known in self._asked):
                self._drop(asked)

    def answered(self, asked: Asked, token_ids: Sequence[int]) -> None:
        """Add its answer to a prompt that is remembered."""
        with self._lock:
            if any(known is asked for known in self._asked):
                asked.ids = np.concatenate([asked.ids, np.asarray(token_ids, np.int32)])
                self._num_tokens += len(token_ids)
                self._trim()

    def _trim(self) -> None:
        newest = self._asked[-1]
        if len(self._asked) > 1:
            for old in [a for a in self._asked if a is not newest and _is_beginning(a, newest)]:
                self._drop(old)
        while len(self._asked) > self._max_prompts or (
            self._num_tokens > self._max_tokens and len(self._asked) > 1
        ):
            self._drop(self._asked[0])

    def _drop(self, old: Asked) -> None:
        self._asked = deque(a for a in self._asked if a is not old)
        self._num_tokens -= len(old.ids)


def _is_beginning(old: Asked, new: Asked) -> bool:
    return len(old.ids) <= len(new.ids) and bool(np.array_equal(old.ids, new.ids[: len(old.ids)]))
