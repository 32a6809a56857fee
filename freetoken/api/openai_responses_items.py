"""Items and tools of OpenAI's Responses API, brought to the Conversation's neutral form.

Owns what each item means (neighbouring reasoning, message and call items of the assistant are one
turn) and the names of tools: namespaces are flattened for the model and found again for the client,
freeform tools become functions with one string. Hosted tools, and their items, are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freetoken.api.thoughts import unsign
from freetoken.chat.conversation import Message, Tool, ToolCall, parse_arguments, text_of
from freetoken.core.errors import RequestError
from freetoken.core.log import logger

Item = Mapping[str, Any]
INPUT = "input"
_FREEFORM = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
_HOSTED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "mcp_list_tools",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
)
_HOSTED_TOOLS = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
)
_log = logger("api")


class ToolNames:
    """The tools of one request: as the model sees them, and what each name is to the client."""

    def __init__(self, tools: Sequence[Item]) -> None:
        self.tools: list[Tool] = []
        self._namespaces: dict[str, tuple[str, str]] = {}
        self._freeform: set[str] = set()
        for i, tool in enumerate(tools):
            self._add(tool, f"tools[{i}]", "")

    def is_freeform(self, name: str) -> bool:
        return name in self._freeform

    def split(self, name: str) -> tuple[str | None, str]:
        """(namespace, name) of a tool as the client knows it."""
        return self._namespaces.get(name, (None, name))

    def flat(self, namespace: object, name: str) -> str:
        """The model's name for a tool that the client calls so."""
        return _joined(namespace, name) if isinstance(namespace, str) and namespace else name

    def keep(self, names: set[str]) -> None:
        self.tools = [tool for tool in self.tools if tool.name in names]

    def _add(self, tool: object, where: str, namespace: str) -> None:
        if not isinstance(tool, Mapping):
            tool = {"type": type(tool).__name__}
        kind, name = tool.get("type", "function"), tool.get("name")
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            for k, inner in enumerate(tool["tools"]):
                self._add(inner, f"{where}.tools[{k}]", str(name or ""))
        elif str(kind).startswith(_HOSTED_TOOLS):
            _log.debug("skipped the hosted tool %s", kind)
        elif kind not in ("function", "custom") or not isinstance(name, str) or not name:
            raise RequestError(
                f"{where} of type {kind!r} is not a function with a name.",
                code="unsupported_tool",
                hint="Send tools as {type: function, name, description, parameters}.",
                param=where,
            )
        else:
            self._offer(tool, name, namespace, freeform=kind == "custom")

    def _offer(self, tool: Item, name: str, namespace: str, *, freeform: bool) -> None:
        flat = self.flat(namespace, name)
        if namespace:
            self._namespaces[flat] = (namespace, name)
        described, schema = str(tool.get("description") or ""), tool.get("parameters")
        if freeform:
            self._freeform.add(flat)
            schema = _FREEFORM
        more = {"parameters": schema} if isinstance(schema, dict) else {}
        self.tools.append(Tool(flat, described, strict=tool.get("strict") is True, **more))


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


class _Answered:
    """An assistant's turn under construction."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def turn(self) -> list[Message]:
        if not (self.texts or self.thoughts or self.calls):
            return []
        text, thought = "\n".join(filter(None, self.texts)), "\n".join(filter(None, self.thoughts))
        return [Message("assistant", text, thought, tuple(self.calls))]


def read_items(items: Sequence[object], names: ToolNames) -> list[Message]:
    """All items as turns. Raises RequestError naming the item."""
    turns: list[Message] = []
    answered = _Answered()
    called: dict[str, str] = {}
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise _refused(f"{where} is not an object", where)
        kind = item.get("type") or ("message" if "role" in item else "")
        if kind == "reasoning":
            answered.thoughts.append(_thought(item, where))
        elif kind in ("function_call", "custom_tool_call"):
            call = _call(item, names, where)
            called[call.id] = call.name
            answered.calls.append(call)
        elif kind == "message" and item.get("role") == "assistant":
            answered.texts.append(text_of(item.get("content"), where))
        elif kind not in _HOSTED_ITEMS:
            turns += [*answered.turn(), _turn(kind, item, called, where)]
            answered = _Answered()
    return turns + answered.turn()


def _turn(kind: str, item: Item, called: Mapping[str, str], where: str) -> Message:
    if kind == "message":
        return Message.make(str(item.get("role")), item.get("content"), where=where)
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = str(item.get("call_id") or "")
        output = text_of(item.get("output"), where)
        return Message("tool", output, tool_call_id=call_id, name=called.get(call_id))
    raise _refused(f"{where}: an item of type {kind!r} is not supported here", where)


def _call(item: Item, names: ToolNames, where: str) -> ToolCall:
    call_id, name = item.get("call_id"), item.get("name")
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise _refused(f"{where}: a call needs a call_id and a name", where)
    flat = names.flat(item.get("namespace"), name)
    if item.get("type") == "custom_tool_call":
        return ToolCall(call_id, flat, {INPUT: str(item.get(INPUT) or "")})
    given = item.get("arguments")
    return ToolCall(call_id, flat, parse_arguments(given if isinstance(given, (str, dict)) else ""))


def _thought(item: Item, where: str) -> str:
    """The raw thought, else the one that the encrypted content carries, else the summary."""
    texts = [_parts(item.get("content"), where), unsign(str(item.get("encrypted_content") or ""))]
    return next((t for t in texts if t), "") or _parts(item.get("summary"), where)


def _parts(parts: object, where: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _refused(f"{where}: a reasoning item's content must be a list of parts", where)
    return "\n".join(str(part.get("text") or "") for part in parts)


def _refused(what: str, where: str) -> RequestError:
    return RequestError(
        f"{what}.", code="unsupported_content", hint="Remove the item or send it as a message.", param=where
    )
