"""What was said so far, in one neutral form that every protocol converts to and templates read.

Owns the normal form: null, "" and [] are one empty content; empty text parts vanish; text parts are
joined by a newline, so a string equals one text block; developer is system and function is tool.
Parts other than text are refused by name. Knows no protocol, template or tokenizer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from freetoken.core.errors import RequestError

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Arguments: TypeAlias = "dict[str, Any] | str"

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made. `arguments` is an object, or JSON text as it came."""

    id: str
    name: str
    arguments: Arguments


@dataclass(frozen=True)
class Tool:
    """A function on offer. `parameters` is a JSON schema of an object; `strict`: calls must obey it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def to_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class AnswerFormat:
    """The form that an answer's text must have.

    kind   json_schema (`value` is the schema), regex, grammar (Lark or GBNF), choice (a list of texts)
    where  the request's field, for errors
    """

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    value: Any
    where: str = "response_format"


@dataclass(frozen=True)
class Message:
    """One turn in normal form; `make` builds it from what a client sent."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def make(
        cls,
        role: str,
        content: object = None,
        *,
        where: str = "message",
        reasoning: str | None = None,
        tool_calls: Sequence[ToolCall] | None = None,
        **more: str | None,
    ) -> Message:
        """Build a message in normal form.

        role     any protocol's role name
        content  None, a string, or a list of strings and part objects
        where    how errors call this message, e.g. `messages[2]`
        more     tool_call_id, name
        Raises RequestError `invalid_role`, `invalid_content` or `unsupported_content`.
        """
        if role not in _ROLES:
            raise RequestError(
                f"{where}: unknown role {role!r}.",
                code="invalid_role",
                hint=f"Use one of: {', '.join(_ROLES)}.",
                param=where,
            )
        text = text_of(content, where)
        return cls(_ROLES[role], text, reasoning or "", tuple(tool_calls or ()), **more)


@dataclass(frozen=True)
class Conversation:
    """Everything that decides the prompt and how the answer is read.

    tool_choice      auto, none, required, or named (then `forced_tool` is the tool's name)
    thinking         True, False, or None for the template's default
    think_budget     most tokens of a thinking block, None for no limit
    template_kwargs  passed to the template as they are
    answer_format    None: free text
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required", "named"] = "auto"
    forced_tool: str | None = None
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    think_budget: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer_format: AnswerFormat | None = None

    @property
    def opening_id(self) -> str:
        """The same for all turns of a conversation, as a rule: a checksum of how it opens."""
        opening = "\0".join(f"{turn.role}\0{turn.content}" for turn in self.messages[:2])
        return f"{zlib.crc32(opening.encode('utf-8', 'replace')):08x}"

    @property
    def is_formed(self) -> bool:
        """The answer, or a part of it, must have a form."""
        forced = self.tool_choice in ("required", "named")
        return forced or self.answer_format is not None or any(tool.strict for tool in self.offered_tools)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call: none when the choice is `none`."""
        return () if self.tool_choice == "none" else self.tools


def text_of(content: object, where: str) -> str:
    """Bring any content to its text. See the module's docstring for the rules."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content must be a string or a list of parts.",
            code="invalid_content",
            hint="Send the text as a plain string.",
            param=f"{where}.content",
        )
    texts = (_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return "\n".join(text for text in texts if text)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where}: a part of type {kind!r} is not supported; this model reads text only.",
            code="unsupported_content",
            hint="Remove the part or describe it in words.",
            param=where,
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text must be a string.",
            code="invalid_content",
            hint="Send the part as an object with type text and a string.",
            param=where,
        )
    return text


def parse_arguments(arguments: Arguments) -> Arguments:
    """Turn JSON text into the object that templates expect; "" is {}; anything else stays raw."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
