"""Events to a Response of OpenAI's: the stream's events and the whole object.

One list of items is built from the events; the stream tells its growth and the final object is its
end, so ids and texts are equal everywhere. Invariants: sequence numbers rise from 0 by one, an item
keeps its id and index, one item is open at a time, exactly one of completed, incomplete and failed
ends the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from freetoken.api.choices import Piece
from freetoken.api.openai_responses_items import INPUT, ToolNames
from freetoken.api.openai_wire import chat_logprobs
from freetoken.api.sse import NamedEvents
from freetoken.api.thoughts import sign
from freetoken.chat.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    merged,
)
from freetoken.core.errors import FreeTokenError

Item = dict[str, Any]


@dataclass(frozen=True)
class Head:
    """What a response says of its request, and what the client wished to see.

    echo       fields repeated from the request
    names      of the request's tools
    logprobs   add log probabilities to texts
    encrypted  add the opaque form of thoughts
    """

    request_id: str
    model: str
    echo: dict[str, Any]
    names: ToolNames
    logprobs: bool = False
    encrypted: bool = False


class ResponseRenderer(NamedEvents):
    """Renders one answer. `on_done(output, body)` is told once, when the answer is complete."""

    def __init__(self, head: Head, on_done: Callable[[list[Item], bytes], None]) -> None:
        self._head = head
        self._on_done = on_done
        self._created = int(time.time())
        self._output: list[Item] = []
        self._open: Item | None = None
        self._raw = ""
        self._tokens: list[TokenInfo] = []
        self._frames: list[bytes] = []
        self._sequence = 0
        self._finish = Finish("stop")

    # --- the renderer's face ---

    def feed(self, pieces: Iterable[Piece]) -> list[bytes]:
        self._begin()
        wanted = (e for _, e in pieces if self._head.logprobs or not isinstance(e, TokenLogprobs))
        for event in merged(wanted):
            self._take(event)
        return self._taken()

    def tail(self, usage: Usage) -> list[bytes]:
        self._begin()
        response = self._end(usage)
        self._emit(f"response.{response['status']}", response=response)
        return self._taken()

    def whole(self, usage: Usage) -> bytes:
        return msgspec.json.encode(self._end(usage))

    def failed(self, error: FreeTokenError) -> list[bytes]:
        self._begin()
        fault = {"code": error.code, "message": str(error)}
        self._emit("response.failed", response={**self._response("failed"), "error": fault})
        return self._taken()

    def silent(self) -> list[bytes]:
        if not self._begin():
            self._emit("response.in_progress", response=self._response("in_progress"))
        return self._taken()

    # --- events in ---

    def _take(self, event: Event) -> None:
        if isinstance(event, TokenLogprobs):
            self._tokens += event.tokens if event.channel == "content" else ()
        elif isinstance(event, TextDelta):
            self._text(event.text)
        elif isinstance(event, ReasoningDelta):
            self._thought(event.text)
        elif isinstance(event, ToolCallStart):
            self._call(event)
        elif isinstance(event, ToolCallDelta):
            self._arguments(event.arguments_text)
        elif isinstance(event, ToolCallEnd):
            self._close(complete=event.complete)
        elif isinstance(event, Finish):
            self._finish = event

    def _text(self, text: str) -> None:
        item = self._open
        if item is None or item["type"] != "message":
            item = self._add({"type": "message", "status": "in_progress", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            self._at(item, "content_part.added", content_index=0, part=part)
        tokens, self._tokens = self._tokens, []
        entries = msgspec.to_builtins(chat_logprobs(tokens).content)
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"] += entries
        self._at(item, "output_text.delta", content_index=0, delta=text, logprobs=entries)

    def _thought(self, text: str) -> None:
        item = self._open
        if item is None or item["type"] != "reasoning":
            item = self._add({"type": "reasoning", "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
            item["content"].append(part)
            self._at(item, "content_part.added", content_index=0, part=part)
        item["content"][0]["text"] += text
        self._at(item, "reasoning_text.delta", content_index=0, delta=text)

    def _call(self, start: ToolCallStart) -> None:
        namespace, name = self._head.names.split(start.name)
        freeform = self._head.names.is_freeform(start.name)
        item: Item = {"type": "custom_tool_call" if freeform else "function_call", "call_id": start.id}
        item["name"] = name
        if namespace is not None:
            item["namespace"] = namespace
        item[INPUT if freeform else "arguments"] = ""
        self._add({**item, "status": "in_progress"})

    def _arguments(self, text: str) -> None:
        item = self._open
        assert item is not None
        self._raw += text
        if item["type"] == "function_call":
            item["arguments"] += text
            self._at(item, "function_call_arguments.delta", delta=text)

    # --- items ---

    def _add(self, item: Item) -> Item:
        self._close()
        prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
        identity = f"{prefix}_{self._head.request_id}_{len(self._output)}"
        self._open = item = {"type": item["type"], "id": identity, **item}
        self._raw = ""
        self._output.append(item)
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=item)
        return item

    def _close(self, *, complete: bool = True) -> None:
        """End the open item: what is done of it, then the item itself."""
        item, self._open = self._open, None
        if item is None:
            return
        if "status" in item:
            item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "message":
            part = item["content"][0]
            fields = {"text": part["text"], "logprobs": part["logprobs"]}
            self._at(item, "output_text.done", content_index=0, **fields)
            self._at(item, "content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = item["content"][0]
            self._at(item, "reasoning_text.done", content_index=0, text=part["text"])
            self._at(item, "content_part.done", content_index=0, part=part)
            item["encrypted_content"] = sign(part["text"], carry=True) if self._head.encrypted else None
        elif item["type"] == "function_call":
            self._at(item, "function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            item[INPUT] = _freeform(self._raw)
            self._at(item, "custom_tool_call_input.delta", delta=item[INPUT])
            self._at(item, "custom_tool_call_input.done", input=item[INPUT])
        self._emit("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _at(self, item: Item, event: str, **fields: Any) -> None:
        self._emit(f"response.{event}", item_id=item["id"], output_index=len(self._output) - 1, **fields)

    # --- the response ---

    def _begin(self) -> bool:
        if self._sequence:
            return False
        self._emit("response.created", response=self._response("in_progress"))
        self._emit("response.in_progress", response=self._response("in_progress"))
        return True

    def _end(self, usage: Usage) -> dict[str, Any]:
        cut = self._finish.reason == "length"
        self._close(complete=not cut)
        response = self._response("incomplete" if cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["output"] = self._output
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        self._on_done(self._output, msgspec.json.encode(response))
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self._head.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._head.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._head.echo,
        }

    def _emit(self, event: str, **fields: Any) -> None:
        self._frames.append(msgspec.json.encode({"type": event, "sequence_number": self._sequence, **fields}))
        self._sequence += 1

    def _taken(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames


def _freeform(arguments: str) -> str:
    """The one string of a freeform tool's arguments."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    return str(value.get(INPUT) or "") if isinstance(value, dict) else arguments
