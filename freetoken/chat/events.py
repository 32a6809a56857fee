"""What a model answers, as neutral events that every protocol renders in its own shape.

A whole answer is the fold of its events, so a streamed and a whole answer are equal by construction.
Calls carry rising indices from 0; between `ToolCallStart` and `ToolCallEnd` of one index no other
call's events appear. Token log probabilities travel beside the text, in order, one per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "error"]
Channel: TypeAlias = Literal["content", "reasoning", "tool"]


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens; cached ones are part of the prompt, reasoning ones of the completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class TokenInfo:
    """One drawn token. `text` may hold U+FFFD where `bytes` are part of a character; natural log.

    top  the best alternatives, best first, each with an empty `top`
    """

    id: int
    text: str
    bytes: bytes
    logprob: float
    top: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the arguments' JSON text; the pieces of a complete call concatenate to one object."""

    index: int
    arguments_text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """`complete` is False when the answer broke off, or went wrong, inside the arguments.

    Such arguments are left as they are and don't parse: closing them would make a client run a call
    that the model never finished.
    """

    index: int
    complete: bool = True


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of tokens just taken in. `channel` is where the tokens' text began."""

    tokens: tuple[TokenInfo, ...]
    channel: Channel = "content"


@dataclass(frozen=True)
class Finish:
    """The last event. `stop` is the stop string that ended the answer, if one did."""

    reason: Reason
    usage: Usage = Usage()
    stop: str | None = None


Event: TypeAlias = (
    TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | TokenLogprobs | Finish
)


@dataclass
class AnsweredCall:
    """A call as answered: `arguments` is JSON text, an object if `complete`."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Answer:
    """A whole answer. `content` is "" when the model said nothing beside thoughts and calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[AnsweredCall] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, event: Event) -> None:
        """Take one event in; events come in stream order."""
        if isinstance(event, TextDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            self.tool_calls.append(AnsweredCall(event.id, event.name))
        elif isinstance(event, ToolCallDelta):
            self.tool_calls[event.index].arguments += event.arguments_text
        elif isinstance(event, ToolCallEnd):
            self.tool_calls[event.index].complete = event.complete
        elif isinstance(event, TokenLogprobs):
            self.logprobs.extend(event.tokens)
        else:
            self.finish = event


def fold(events: Iterable[Event]) -> Answer:
    """Make the whole answer out of its events."""
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


def merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbours of one kind, so that one feed gives few events."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == event.index
        ):
            out[-1] = ToolCallDelta(event.index, last.arguments_text + event.arguments_text)
        else:
            out.append(event)
    return out
