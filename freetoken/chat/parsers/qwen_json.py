"""Calls as JSON between `<tool_call>` and `</tool_call>`, thoughts between `<think>` and `</think>`.

The form of Qwen2.5, Qwen3 and Hermes. A call that is no JSON object with a name is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import Tool
from freetoken.chat.events import Answer
from freetoken.chat.grammar import BACK, Grammar, Sink, State, Think, spoken_rows
from freetoken.chat.lark import json_term, literal, parameters_schema
from freetoken.chat.parsers._example import Example, tool
from freetoken.chat.stream_parser import parse_whole

RANK = 10
THINK = Think("<think>", "</think>")


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def call_rule(tool: Tool, name: str, mark: Callable[[str], str]) -> str:
    opening = literal(f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    return (
        f"{name}: {mark('<tool_call>')} {opening} {name}_arguments {literal('}' + chr(10))} "
        f"{mark('</tool_call>')}\n{name}_arguments: {json_term(parameters_schema(tool))}\n"
    )


GRAMMAR = Grammar(
    {
        **spoken_rows({"<tool_call>": "call"}, THINK),
        "call": State(Sink.JSON, {}, otherwise="tail"),
        # One bracket too many is a slip that models make.
        "tail": State(Sink.NOWHERE, {"</tool_call>": BACK, "}": "tail"}, otherwise=BACK),
    },
    think=THINK,
    opens=("<think>", "<tool_call>", "<tool_response>"),
    closes=("</think>", "</tool_call>", "</tool_response>"),
    write_call=write_call,
    call_rule=call_rule,
)


def detect(template: str) -> bool:
    return "<think>" in template or "<tool_call>" in template


def parse(text: str, tools: Sequence[Tool] = (), *, in_thinking: bool = False) -> Answer:
    """Read a whole answer."""
    return parse_whole(GRAMMAR, text, tools, in_thinking)


_TOOLS = (tool("get_weather", city="string", days="integer"), tool("now"))
_WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon", "days": 3}}\n</tool_call>'
_LISBON = ("get_weather", {"city": "Lisbon", "days": 3})
_SCRIPTS = "\u4f60\u597d <b>&amp;\u2019 \U0001f469\u200d\U0001f4bb"

EXAMPLES = (
    Example("Hello.", "Hello.", tools=_TOOLS),
    Example("<think>\nShort.\n</think>\n\nHello.", "Hello.", "Short.", tools=_TOOLS),
    Example("<think>\n\n</think>\n\nHello.\n", "Hello.\n"),
    Example("Thought.\n</think>\n\n  indented", "  indented", "Thought.", in_thinking=True),
    Example(_WEATHER, calls=(_LISBON,), tools=_TOOLS),
    Example(
        f'I look.\n\n{_WEATHER}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
        "I look.",
        calls=(_LISBON, ("now", {})),
        tools=_TOOLS,
    ),
    Example(
        f"Look.\n</think>\n\n{_WEATHER}",
        reasoning="Look.",
        calls=(_LISBON,),
        tools=_TOOLS,
        in_thinking=True,
    ),
    Example(  # the thought was never closed
        f"Look.\n{_WEATHER}",
        reasoning="Look.",
        calls=(_LISBON,),
        tools=_TOOLS,
        in_thinking=True,
    ),
    Example('<tool_call>{"name":"now"}</tool_call>', calls=(("now", {}),), tools=_TOOLS),
    Example(
        '<tool_call>{"arguments": {"a": ["x", {"b": null}], "c": "</tool_call>"}, "name": "now"}</tool_call>',
        calls=(("now", {"a": ["x", {"b": None}], "c": "</tool_call>"}),),
        tools=_TOOLS,
    ),
    Example(
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=(("now", {"a": 1}),),
        tools=_TOOLS,
    ),
    Example(  # what models get wrong without changing what they mean
        '<tool_call>{"name": "now", "arguments": {"a": "x\ny\\d", "b": True, "c": [1, 2,],}}}\n</tool_call>',
        calls=(("now", {"a": "x\ny\\d", "b": True, "c": [1, 2]}),),
        tools=_TOOLS,
    ),
    Example(  # the last bracket is missing
        '<tool_call>{"name": "now", "arguments": {"a": -1.5e3}\n</tool_call>',
        calls=(("now", {"a": -1500.0}),),
        tools=_TOOLS,
    ),
    Example(
        f'<tool_call>{{"name": "now", "arguments": {{"t": "{_SCRIPTS} \\u00e9"}}}}</tool_call>',
        calls=(("now", {"t": f"{_SCRIPTS} \u00e9"}),),
        tools=_TOOLS,
    ),
    Example(_WEATHER, _WEATHER),  # no tools on offer
    Example("Use <tool_call> to call.", "Use <tool_call> to call.", tools=_TOOLS),
    Example("A <tool_call>{oops}</tool_call> b", "A <tool_call>{oops}</tool_call> b", tools=_TOOLS),
    Example(f"<tool_call>\n{_WEATHER}", "<tool_call>", calls=(_LISBON,), tools=_TOOLS),
    Example("Say <think> aloud, a < b, </thin", "Say <think> aloud, a < b, </thin", tools=_TOOLS),
    Example("half <tool_ca", "half <tool_ca", tools=_TOOLS),
)
