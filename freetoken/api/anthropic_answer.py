"""Events to Anthropic's message: the stream's events, the whole message, the error body.

One list of blocks is built from the events; the stream tells its growth and the whole answer is its
end, so both are equal. Invariants: one block is open at a time, indices rise from 0, a thinking block
ends with its one non-empty signature, the last two events are message_delta and message_stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from freetoken.api.choices import Piece
from freetoken.api.sse import NamedEvents
from freetoken.api.thoughts import sign
from freetoken.chat.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    merged,
)
from freetoken.core.errors import ContextLengthError, FreeTokenError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Text(msgspec.Struct, tag="text"):
    text: str = ""


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)


class TextPiece(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class Signature(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputPiece(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class OutputDetails(msgspec.Struct):
    thinking_tokens: int


class UsageBody(msgspec.Struct):
    """`input_tokens` are those that no cache supplied; the three input figures add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class MessageBody(msgspec.Struct, tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Text | Thinking | ToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageBody


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageBody


class BlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: Text | Thinking | ToolUse


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | Signature | InputPiece


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: Stop
    usage: UsageBody


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag="ping"):
    pass


class ErrorDetail(msgspec.Struct):
    type: str
    message: str
    code: str


class ErrorEvent(msgspec.Struct, tag="error"):
    error: ErrorDetail


class CountBody(msgspec.Struct):
    input_tokens: int


def error_body(error: FreeTokenError) -> bytes:
    """One error in Anthropic's shape; `code` is ours and stable."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if isinstance(error, ContextLengthError):
        # The wording by which agents know that they must compact; a prompt leaves room for one token.
        message = f"prompt is too long: {error.used} tokens > {error.limit - 1} maximum"
    return msgspec.json.encode(ErrorEvent(ErrorDetail(kind, message, error.code)))


class MessageRenderer(NamedEvents):
    """Renders one answer.

    prompt_tokens   length of the prompt
    max_tokens      what the client asked for at most
    omit_thinking   keep thoughts out of the text; the signature carries them
    """

    def __init__(
        self, request_id: str, model: str, prompt_tokens: int, max_tokens: int, *, omit_thinking: bool
    ) -> None:
        self._id = f"msg_{request_id}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._omits = omit_thinking
        self._blocks: list[Text | Thinking | ToolUse] = []
        self._is_open = False
        self._raw = ""
        self._frames: list[bytes] = []
        self._begun = False
        self._finish = Finish("stop")

    def feed(self, pieces: Iterable[Piece]) -> list[bytes]:
        self._begin()
        for event in merged(e for _, e in pieces if not isinstance(e, TokenLogprobs)):
            self._take(event)
        return self._taken()

    def tail(self, usage: Usage) -> list[bytes]:
        self._begin()
        self._close()
        self._emit(MessageDelta(Stop(self._reason(usage), self._finish.stop), _usage(usage)))
        self._emit(MessageStop())
        return self._taken()

    def whole(self, usage: Usage) -> bytes:
        self._close()
        return msgspec.json.encode(self._body(self._blocks, _usage(usage), self._reason(usage)))

    def failed(self, error: FreeTokenError) -> list[bytes]:
        return [error_body(error)]

    def silent(self) -> list[bytes]:
        self._begin()
        self._emit(Ping())
        return self._taken()

    def _take(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._text(event.text)
        elif isinstance(event, ReasoningDelta):
            self._thought(event.text)
        elif isinstance(event, ToolCallStart):
            self._open(ToolUse(event.id, event.name))
        elif isinstance(event, ToolCallDelta):
            self._raw += event.arguments_text
            self._delta(InputPiece(event.arguments_text))
        elif isinstance(event, ToolCallEnd):
            self._close()
        elif isinstance(event, Finish):
            self._finish = event

    def _text(self, text: str) -> None:
        block = self._blocks[-1] if self._is_open else None
        if not isinstance(block, Text):
            self._open(block := Text())
        self._delta(TextPiece(text))
        block.text += text

    def _thought(self, text: str) -> None:
        block = self._blocks[-1] if self._is_open else None
        if not isinstance(block, Thinking):
            self._open(block := Thinking())
        self._raw += text
        if not self._omits:
            self._delta(ThinkingPiece(text))
            block.thinking += text

    def _open(self, block: Text | Thinking | ToolUse) -> None:
        self._close()
        self._raw, self._is_open = "", True
        self._blocks.append(block)
        self._emit(BlockStart(len(self._blocks) - 1, block))

    def _delta(self, delta: TextPiece | ThinkingPiece | Signature | InputPiece) -> None:
        self._emit(BlockDelta(len(self._blocks) - 1, delta))

    def _close(self) -> None:
        """End the open block. A call that broke off has the input {} in a whole answer."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if isinstance(block, Thinking):
            block.signature = sign(self._raw, carry=self._omits)
            self._delta(Signature(block.signature))
        elif isinstance(block, ToolUse):
            block.input = _object(self._raw)
        self._emit(BlockStop(len(self._blocks) - 1))

    def _reason(self, usage: Usage) -> str:
        if self._finish.stop is not None:
            return "stop_sequence"
        if self._finish.reason == "length":
            capped = usage.completion_tokens >= self._max_tokens
            return "max_tokens" if capped else "model_context_window_exceeded"
        return "tool_use" if any(isinstance(b, ToolUse) for b in self._blocks) else "end_turn"

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._emit(MessageStart(self._body([], _usage(Usage(self._prompt_tokens)), None)))

    def _body(
        self, content: list[Text | Thinking | ToolUse], usage: UsageBody, reason: str | None
    ) -> MessageBody:
        stop = self._finish.stop if reason else None
        return MessageBody(self._id, "assistant", self._model, content, reason, stop, usage)

    def _emit(self, event: msgspec.Struct) -> None:
        self._frames.append(msgspec.json.encode(event))

    def _taken(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames


def _usage(usage: Usage) -> UsageBody:
    cached = usage.cached_tokens
    details = OutputDetails(usage.reasoning_tokens)
    return UsageBody(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens, details)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
