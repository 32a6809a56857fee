"""A session that plays answers from a script: the token source is fake, everything else is real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import Conversation
from freetoken.chat.events import (
    Event,
    Finish,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from freetoken.core.generate import GenerateParams


def text(*pieces: str, tokens: int | None = None) -> list[Event]:
    usage = Usage(prompt_tokens=5, completion_tokens=tokens or len(pieces))
    return [*(TextDelta(p) for p in pieces), Finish("stop", usage)]


def call(name: str, arguments: str, *, complete: bool = True) -> list[Event]:
    half = len(arguments) // 2
    return [
        ToolCallStart(0, "call_1", name),
        ToolCallDelta(0, arguments[:half]),
        ToolCallDelta(0, arguments[half:]),
        ToolCallEnd(0, complete),
        Finish("tool_calls", Usage(5, 7)),
    ]


class ScriptedStream:
    """Plays events; an exception in the list is raised at its place."""

    def __init__(self, events: Sequence[Event | BaseException]) -> None:
        self.events = events
        self.cancelled = False

    def __iter__(self) -> Iterator[Event]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedSession:
    """Answers in order; remembers what was asked."""

    model_name = "scripted"
    place = "in a test"

    def __init__(self, *answers: Sequence[Event | BaseException]) -> None:
        self.streams = [ScriptedStream(a) for a in answers]
        self.asked: list[tuple[Conversation, GenerateParams]] = []
        self.counters: dict[str, Any] = {}

    def ask(self, conversation: Conversation, params: GenerateParams) -> ScriptedStream:
        self.asked.append((conversation, params))
        return self.streams[len(self.asked) - 1]

    def stats(self) -> Mapping[str, Any]:
        return self.counters

    def close(self) -> None:
        pass
