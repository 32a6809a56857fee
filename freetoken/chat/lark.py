"""The form of an answer as a grammar text: formats, and calls of tools in a model's own form.

Owns how alternatives are put together; each call format writes its own rules. The dialect is Lark
with embedded JSON schemas. Knows no tokens: markers that are one token are written by the caller.

    a format alone                 content
    a format, tools on offer       content, or calls
    a call is required, or named   calls
    strict tools, choice auto      any text, but calls obey the schemas of strict tools

A form that begins an answer's text with a head of its own has it in front of content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import AnswerFormat, Conversation, Tool
from freetoken.chat.grammar import Grammar
from freetoken.core.errors import RequestError

_SPACE = r"[ \n]{0,12}"
"""Between JSON's tokens: room for indentation, no room for a model that never stops."""
_TEXT = "TEXT: /(.|\\n)*/\n"


def answer_lark(conversation: Conversation, grammar: Grammar, mark: Callable[[str], str]) -> str | None:
    """The grammar that an answer must follow, None if it is free.

    mark  writes a marker as a term
    Raises RequestError `unsupported_tool_choice` where calls are wanted and the format has none.
    """
    choice, tools = conversation.tool_choice, conversation.offered_tools
    if choice == "named":
        tools = tuple(tool for tool in tools if tool.name == conversation.forced_tool)
    many = conversation.parallel_tool_calls and choice != "named" and not grammar.one_call
    head = _terms(grammar.answer_head, (*grammar.opens, *grammar.closes, *grammar.marks), mark)
    wished = conversation.answer_format
    if choice in ("required", "named"):
        return f"start: {'calls' if many else 'call'}\n{_calls(tools, grammar, mark)}"
    if wished is not None and wished.kind == "grammar":
        return str(wished.value)
    if wished is not None:
        with_calls = bool(tools) and grammar.call_rule is not None
        calls = " | calls" if many else " | call"
        start = f"start: content{calls if with_calls else ''}\ncontent: {head}({_content(wished)})\n"
        return start + (_calls(tools, grammar, mark) if with_calls else "")
    if any(tool.strict for tool in tools) and grammar.call_rule is not None:
        if head:
            return f"start: {head}TEXT | call\n{_TEXT}{_calls(tools, grammar, mark)}"
        return f"start: TEXT (call TEXT){'*' if many else '?'}\n{_TEXT}{_calls(tools, grammar, mark)}"
    return None


def _calls(tools: tuple[Tool, ...], grammar: Grammar, mark: Callable[[str], str]) -> str:
    if grammar.call_rule is None:
        raise RequestError(
            "This model has no form for tool calls.",
            code="unsupported_tool_choice",
            hint="Leave tool_choice out.",
            param="tool_choice",
        )
    names = [f"call_{i}" for i in range(len(tools))]
    rules = [grammar.call_rule(tool, name, mark) for tool, name in zip(tools, names, strict=True)]
    return f'calls: call ("\\n" call)*\ncall: {" | ".join(names)}\n' + "".join(rules)


def _content(wished: AnswerFormat) -> str:
    if wished.kind == "regex":
        return f"/{_slashed(wished.value)}/"
    if wished.kind == "choice":
        return " | ".join(literal(text) for text in wished.value)
    return json_term(wished.value)


def _terms(text: str, markers: Sequence[str], mark: Callable[[str], str]) -> str:
    """A text with markers in it as terms, each followed by a space."""
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if text else []
    return "".join(f"{mark(piece) if piece in markers else literal(piece)} " for piece in pieces if piece)


def literal(text: str) -> str:
    """A text as a term."""
    return json.dumps(text, ensure_ascii=False)


def json_term(schema: Mapping[str, Any]) -> str:
    """JSON that obeys a schema as a term."""
    own = schema.get("x-guidance")
    style = {"whitespace_pattern": _SPACE, **(own if isinstance(own, Mapping) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': style}, ensure_ascii=False)}"


def parameters_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Words that can't be enforced count only for strict tools."""
    schema = {"type": "object", **tool.parameters}
    return schema if tool.strict else {**schema, "x-guidance": {"lenient": True}}


def parameters_of(schema: Mapping[str, Any]) -> dict[str, bool]:
    """The parameters that a schema names: key -> whether it is required. RequestError `invalid_grammar`."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError(
            "A tool's parameters need an object as properties and a list as required.",
            code="invalid_grammar",
            hint="Send a JSON schema of an object.",
            param="tools",
        )
    return {key: key in required for key in properties}


def parameter_schema(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of one parameter, able to stand alone."""
    found = schema["properties"][key]
    shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    return {**shared, **(found if isinstance(found, Mapping) else {})}


def _slashed(pattern: str) -> str:
    """Escape what ends a regular expression in a grammar: slashes and line ends."""
    out, escaped = "", False
    for char in pattern:
        out += "\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char
        escaped = char == "\\" and not escaped
    return out
