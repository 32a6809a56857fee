"""Who answers: an engine in this process, or a server that runs already. Commands see one face.

    Session.ask(conversation, params) -> Stream of chat events, the last one Finish

Owns starting the engine with progress shown. Knows no command and prints nothing but progress.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from freetoken.chat.conversation import Conversation
from freetoken.chat.events import Event
from freetoken.cli._terminal import Progress, Terminal
from freetoken.core import log
from freetoken.core.generate import GenerateParams, Status
from freetoken.core.options import Options


class Stream(Protocol):
    """One answer on its way. `cancel` is idempotent and may come from any thread."""

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None: ...


class Plan(Protocol):
    """What of an engine's plan is shown to people."""

    @property
    def device(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def lines(self) -> list[str]: ...


class Engine(Protocol):
    """The face of `freetoken.llm.LLM` that commands use."""

    @property
    def model_name(self) -> str: ...

    @property
    def plan(self) -> Plan: ...

    def status(self) -> Status: ...

    def submit_chat(self, conversation: Conversation, params: GenerateParams, request_id: str) -> Stream: ...

    def submit_text(self, prompt: str, params: GenerateParams, request_id: str) -> Stream: ...

    def stats(self) -> Mapping[str, Any]: ...

    def resize_memory(self, total_bytes: int) -> object: ...

    def close(self) -> None: ...


class Session(Protocol):
    """Where answers come from. `place` tells people, `model_name` is what it calls the model."""

    @property
    def model_name(self) -> str: ...

    @property
    def place(self) -> str: ...

    def ask(self, conversation: Conversation, params: GenerateParams) -> Stream: ...

    def stats(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class LocalSession:
    """An engine of our own, closed with the session."""

    place = "in this process"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count(1)

    @property
    def model_name(self) -> str:
        return self.engine.model_name

    def ask(self, conversation: Conversation, params: GenerateParams) -> Stream:
        return self.engine.submit_chat(conversation, params, f"chat-{next(self._numbers)}")

    def complete(self, prompt: str, params: GenerateParams) -> Stream:
        """Continue `prompt` as it stands, with no chat template."""
        return self.engine.submit_text(prompt, params, f"text-{next(self._numbers)}")

    def stats(self) -> Mapping[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


def start_engine(options: Options, out: Terminal) -> tuple[Engine, Progress]:
    """Build an engine that answers; the progress line is gone when this returns."""
    # Late: this pulls in torch, which `--help`, errors and remote chats must not wait for.
    from freetoken.llm import build_llm

    progress = Progress(out)
    try:
        engine: Engine = build_llm(options, progress)
    finally:
        progress.finish()
    return engine, progress


def quiet_log(options: Options, given: bool) -> None:
    """Set logging up for a command that talks to a person: warnings only, unless asked for more."""
    level = options.log_level if given else "warning"
    log.configure(level, options.log_file, options.log_json)
