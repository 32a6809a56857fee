"""Writes one answer's tool calls as events: names, then arguments as JSON text, piece by piece.

Two readers fill it: markup formats give keys and values (`ParameterWriter`), JSON formats give JSON
text (`json_call.py`). Owns ids, indices and the point of no return: a call is announced once its
name is known and its arguments have begun; before that it can still turn out to be plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import Tool
from freetoken.chat.events import Event, ToolCallDelta, ToolCallEnd, ToolCallStart
from freetoken.chat.schema_value import accepted_types, value_json

_NAME = re.compile(r"[^\s<>\"'{}()=,;]{1,128}")


def is_name(name: object) -> bool:
    """True for what can be a tool's name; prose and markup can't."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def new_call_id() -> str:
    """An id no other call has: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


class CallWriter:
    """The calls of one answer, in order.

    emit    takes events
    new_id  makes ids
    """

    def __init__(self, emit: Callable[[Event], None], new_id: Callable[[], str] = new_call_id) -> None:
        self._emit = emit
        self._new_id = new_id
        self.count = 0
        self.is_open = False

    def start(self, name: str) -> None:
        """Announce the next call. From here on it can't turn into text any more."""
        self._emit(ToolCallStart(self.count, self._new_id(), name))
        self.count += 1
        self.is_open = True

    def arguments(self, text: str) -> None:
        """Add JSON text to the open call's arguments."""
        if text:
            self._emit(ToolCallDelta(self.count - 1, text))

    def end(self, complete: bool) -> None:
        """End the open call, if there is one."""
        if self.is_open:
            self._emit(ToolCallEnd(self.count - 1, complete))
            self.is_open = False


class ParameterWriter:
    """Arguments that arrive as keys and raw values, typed by the tool's schema.

    A parameter declared a string streams as it comes; any other waits for its end and is written as
    the JSON that its schema allows.
    """

    def __init__(self, calls: CallWriter, tools: Sequence[Tool]) -> None:
        self._calls = calls
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] = frozenset()
        self._value = ""
        self._num_keys = 0
        self._streams = False

    def knows(self, name: str) -> bool:
        return name in self._schemas

    def begin(self, name: str) -> None:
        self._schema = self._schemas.get(name, {})
        self._num_keys = 0
        self._calls.start(name)

    def key(self, key: str) -> None:
        """Begin the parameter `key`."""
        properties = self._schema.get("properties")
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = accepted_types(declared, self._schema)
        self._streams = self._types == {"string"}
        self._value = ""
        lead = ", " if self._num_keys else "{"
        self._num_keys += 1
        opening = '"' if self._streams else ""
        self._calls.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: {opening}")

    def value(self, text: str) -> None:
        """Take a piece of the value in."""
        if self._streams:
            self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def end_value(self) -> None:
        self._calls.arguments('"' if self._streams else value_json(self._value, self._types))

    def end(self) -> None:
        """Close the object; a call without parameters gets `{}`."""
        self._calls.arguments("}" if self._num_keys else "{}")
        self._calls.end(complete=True)
