"""Events to OpenAI's chat chunks and to the whole chat completion, from one stream of events.

Chunks that a slow client has not taken are merged where their kind allows; the whole answer is the
fold of the same events. Invariants: the first chunk of a choice carries the role, exactly one carries
its finish reason, `tool_calls` is never an empty list, call indices rise from 0.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from freetoken.api.choices import Piece
from freetoken.api.openai_wire import ChatLogprobs, UsageBody, chat_logprobs, usage_body
from freetoken.api.sse import Renderer
from freetoken.chat.events import (
    Answer,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)


class FunctionPart(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionPart | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class MessageOut(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct):
    index: int
    message: MessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody


class _Open:
    """One choice's chunk under construction, until its kind changes or the batch ends."""

    def __init__(self, index: int, event: Event) -> None:
        self.index = index
        self.kind = type(event)
        self.text: list[str] = []
        self.call = -1
        self.start: ToolCallStart | None = None
        self.tokens: list[TokenInfo] = []
        self.finish: str | None = None

    def takes(self, event: Event) -> bool:
        """True if `event` may join: log probs go anywhere, text to text, arguments to their call."""
        if isinstance(event, TokenLogprobs) or self.kind is TokenLogprobs:
            return True
        if isinstance(event, ToolCallDelta):
            return self.kind is ToolCallDelta and self.call == event.index
        return isinstance(event, (TextDelta, ReasoningDelta)) and self.kind is type(event)

    def add(self, event: Event) -> None:
        if isinstance(event, TokenLogprobs):
            self.tokens.extend(event.tokens)
            return
        self.kind = type(event)
        if isinstance(event, (TextDelta, ReasoningDelta)):
            self.text.append(event.text)
        elif isinstance(event, ToolCallStart):
            self.start = event
        elif isinstance(event, ToolCallDelta):
            self.call = event.index
            self.text.append(event.arguments_text)
        elif isinstance(event, Finish):
            self.finish = event.reason

    def delta(self) -> Delta:
        text = "".join(self.text)
        if self.kind is TextDelta:
            return Delta(content=text)
        if self.kind is ReasoningDelta:
            return Delta(reasoning_content=text)
        if self.start is not None:
            function = FunctionPart(name=self.start.name, arguments="")
            return Delta(tool_calls=[CallPart(self.start.index, self.start.id, "function", function)])
        if self.kind is ToolCallDelta:
            return Delta(tool_calls=[CallPart(self.call, function=FunctionPart(arguments=text))])
        return Delta()


class ChatRenderer(Renderer):
    """Renders one request's `num_choices` answers."""

    def __init__(
        self, request_id: str, model: str, num_choices: int, *, logprobs: bool, stream: bool, usage: bool
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._wants_logprobs = logprobs
        self._is_stream = stream
        self._wants_usage = usage
        self._answers: defaultdict[int, Answer] = defaultdict(Answer)
        self._num_choices = num_choices
        self._begun: set[int] = set()

    def feed(self, pieces: Iterable[Piece]) -> list[bytes]:
        if not self._is_stream:
            for index, event in pieces:
                self._answers[index].add(event)
            return []
        done: list[_Open] = []
        current: dict[int, _Open] = {}
        for index, event in pieces:
            if isinstance(event, TokenLogprobs) and not self._wants_logprobs:
                continue
            chunk = current.get(index)
            if chunk is None or not chunk.takes(event):
                chunk = current[index] = _Open(index, event)
                done.append(chunk)
            chunk.add(event)
        return self._encode(done)

    def _encode(self, chunks: list[_Open]) -> list[bytes]:
        frames = []
        for chunk in chunks:
            if chunk.index not in self._begun:
                self._begun.add(chunk.index)
                frames.append(self._chunk(ChunkChoice(chunk.index, Delta(role="assistant", content=""))))
            tokens = chat_logprobs(chunk.tokens) if chunk.tokens else None
            delta = chunk.delta()
            if delta != Delta() or tokens or chunk.finish:
                frames.append(self._chunk(ChunkChoice(chunk.index, delta, tokens, chunk.finish)))
        return frames

    def _chunk(self, choice: ChunkChoice) -> bytes:
        chunk = Chunk(self._id, "chat.completion.chunk", self._created, self._model, [choice])
        return msgspec.json.encode(chunk)

    def tail(self, usage: Usage) -> list[bytes]:
        if not self._wants_usage:
            return []
        last = Chunk(self._id, "chat.completion.chunk", self._created, self._model, [], usage_body(usage))
        return [msgspec.json.encode(last)]

    def whole(self, usage: Usage) -> bytes:
        choices = [self._choice(i, self._answers[i]) for i in range(self._num_choices)]
        body = Completion(self._id, "chat.completion", self._created, self._model, choices, usage_body(usage))
        return msgspec.json.encode(body)

    def _choice(self, index: int, answer: Answer) -> Choice:
        calls = [Call(c.id, Function(c.name, c.arguments)) for c in answer.tool_calls]
        message = MessageOut(
            content=None if calls and not answer.content else answer.content,
            reasoning_content=answer.reasoning or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        tokens = chat_logprobs(answer.logprobs) if self._wants_logprobs else None
        return Choice(index, message, tokens, answer.finish.reason if answer.finish else "stop")
