"""The model as this room sees it: a narrow face, so that no protocol depends on the engine.

`freetoken.llm.LLM` fulfils it; tests fulfil it with a script. Everything here is thread-safe on the
model's side. A Generation always ends: with one Finish event, or by raising a FreeTokenError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freetoken.chat.conversation import Conversation
from freetoken.chat.events import Event
from freetoken.core.generate import GenerateParams, PrefixReport, Status, Timing

Prompt = str | NDArray[np.int32]


class Generation(Protocol):
    """One answer on its way.

    Iteration binds to the running event loop when it begins, not at submission, and wakes the loop at
    most once per engine step. After `cancel` it ends soon, with Finish("abort") or without one.
    """

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def reuse(self) -> PrefixReport: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None:
        """Stop generating. Idempotent, never blocks; a no-op after the end."""


class Decoder(Protocol):
    """Ids to text; `freetoken.chat.tokenizer.Tokenizer` is one."""

    def decode(self, ids: NDArray[np.int32], skip_special: bool = True) -> str: ...


class LanguageModel(Protocol):
    """What a server needs of an LLM. Submitting may block for templating and tokenizing."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def created(self) -> int:
        """Unix time in seconds."""

    @property
    def tokenizer(self) -> Decoder: ...

    def status(self) -> Status: ...

    def submit_chat(
        self, conversation: Conversation, params: GenerateParams, request_id: str
    ) -> Generation: ...

    def count_chat(self, conversation: Conversation, params: GenerateParams) -> int:
        """Length in tokens of the prompt that `submit_chat` would run."""

    def submit_text(self, prompt: Prompt, params: GenerateParams, request_id: str) -> Generation: ...

    def stats(self) -> Mapping[str, Any]:
        """Nested plain numbers."""

    def resize_memory(self, total_bytes: int) -> None:
        """Change the device memory budget while requests run; may block. CapacityError: all as it was."""

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let running requests finish, abort what is left after `timeout_s`."""
