"""Calls as markup inside `<tool_call>`, thoughts between `<think>` and `</think>`.

The form of Qwen3-Coder and Qwen3.5: `<function=NAME>`, then `<parameter=KEY>` with the raw value on
lines of its own. Values are typed by the tool's schema. Forgiven: `<tool_call>` missing before a
known function, `</function>` or the last `</parameter>` missing before `</tool_call>`, words between
parameters (they are dropped). A call without a proper function is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import Tool
from freetoken.chat.events import Answer
from freetoken.chat.grammar import BACK, FAIL, Grammar, Sink, State, Think, spoken_rows
from freetoken.chat.lark import json_term, literal, parameter_schema, parameters_of, parameters_schema
from freetoken.chat.parsers._example import Example, tool
from freetoken.chat.schema_value import accepted_types
from freetoken.chat.stream_parser import parse_whole

RANK = 20
THINK = Think("<think>", "</think>")


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    raw = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in raw.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def call_rule(tool: Tool, name: str, mark: Callable[[str], str]) -> str:
    """Parameters in the schema's order; a text ends at its closing marker, as the reader ends it."""
    schema = parameters_schema(tool)
    rules, body = [], []
    for i, (key, is_required) in enumerate(parameters_of(schema).items()):
        rule = f"{name}_{i}"
        body.append(rule if is_required else f"{rule}?")
        rules.append(_parameter_rule(rule, key, parameter_schema(schema, key)))
    opening, closing = literal(f"\n<function={tool.name}>\n"), literal("</function>\n")
    call = f"{name}: {mark('<tool_call>')} {opening} {' '.join(body)} {closing} {mark('</tool_call>')}\n"
    return call + "".join(rules)


def _parameter_rule(rule: str, key: str, schema: Mapping[str, Any]) -> str:
    opening, closing = literal(f"<parameter={key}>\n"), literal("\n</parameter>\n")
    listed = schema.get("enum")
    values = [
        *(listed if isinstance(listed, list) else ()),
        *([schema["const"]] if "const" in schema else ()),
    ]
    if values:
        texts = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
        return f"{rule}: {opening} ({' | '.join(map(literal, texts))}) {closing}\n"
    types = accepted_types(schema, schema)
    if types and "string" not in types:
        return f"{rule}: {opening} {rule}_value {closing}\n{rule}_value: {json_term(schema)}\n"
    text = f"{rule}_text[suffix={literal('</parameter>')}]: /(.|\\n)*/"
    return f'{rule}: {opening} {rule}_text "\\n"\n{text}\n'


GRAMMAR = Grammar(
    {
        **spoken_rows({"<tool_call>": "call", "<function=": "bare name"}, THINK),
        "call": State(Sink.NOWHERE, {"<function=": "name"}, otherwise=FAIL),
        "name": State(Sink.NAME, {">": "parameters"}),
        "bare name": State(Sink.KNOWN_NAME, {">": "parameters"}),
        "parameters": State(
            Sink.NOWHERE, {"<parameter=": "key", "</function>": "tail", "</tool_call>": BACK}
        ),
        "key": State(Sink.KEY, {">": "value", ">\n": "value"}),
        "value": State(
            Sink.VALUE,
            {
                "</parameter>": "parameters",
                "\n</parameter>": "parameters",
                "</function>\n</tool_call>": BACK,
                "\n</function>\n</tool_call>": BACK,
            },
        ),
        "tail": State(Sink.NOWHERE, {"</tool_call>": BACK}, otherwise=BACK),
    },
    think=THINK,
    opens=("<think>", "<tool_call>", "<tool_response>"),
    closes=("</think>", "</tool_call>", "</tool_response>"),
    write_call=write_call,
    call_rule=call_rule,
)


def detect(template: str) -> bool:
    return "<function=" in template and "<parameter=" in template


def parse(text: str, tools: Sequence[Tool] = (), *, in_thinking: bool = False) -> Answer:
    """Read a whole answer."""
    return parse_whole(GRAMMAR, text, tools, in_thinking)


_TOOLS = (
    tool("get_weather", city="string", days="integer"),
    tool("now"),
    tool(
        "write",
        path="string",
        text="string",
        mode={"enum": ["a", "w"]},
        flags={"type": "array", "items": {"type": "string"}},
        options={"type": "object"},
        force="boolean",
        ratio="number",
        limit={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        label={"type": ["string", "null"]},
    ),
)


def _call(name: str, *pairs: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


_WEATHER = _call("get_weather", ("city", "Lisbon"), ("days", "3"))
_LISBON = ("get_weather", {"city": "Lisbon", "days": 3})
_CODE = "  def f(x):\n\n    return \"<b>&\\n\" if x < 3 else '</param'\n"
_SCRIPTS = '\u4f60\u597d \U0001f469\u200d\U0001f4bb </tool_call> "q"'

EXAMPLES = (
    Example("Hello.", "Hello.", tools=_TOOLS),
    Example("\nShort.\n</think>\n\nHello.", "Hello.", "Short.", tools=_TOOLS, in_thinking=True),
    Example("<think>\nA < b.\n</think>\n\n  Hello.\n", "  Hello.\n", "A < b.", tools=_TOOLS),
    Example("Cut off in th", reasoning="Cut off in th", in_thinking=True),
    Example(_WEATHER, calls=(_LISBON,), tools=_TOOLS),
    Example(f"I look.\n\n{_WEATHER}\n{_call('now')}", "I look.", calls=(_LISBON, ("now", {})), tools=_TOOLS),
    Example(f"A.\n\n{_WEATHER}\n\n\nB.\n", "A.\n\nB.\n", calls=(_LISBON,), tools=_TOOLS),
    Example(
        f"Hm.\n</think>\n\n{_WEATHER}\n", reasoning="Hm.", calls=(_LISBON,), tools=_TOOLS, in_thinking=True
    ),
    Example(
        f"Hm.\n{_WEATHER}\nSo.\n</think>\n\nDone.", "Done.", "Hm.\nSo.", (_LISBON,), _TOOLS, in_thinking=True
    ),
    Example(
        _call("write", ("path", "notes/x"), ("text", _CODE), ("mode", "a"), ("label", "null")),
        calls=(("write", {"path": "notes/x", "text": _CODE, "mode": "a", "label": None}),),
        tools=_TOOLS,
    ),
    Example(
        _call(
            "write",
            ("flags", '["a",\n "b"]'),
            ("options", '{"x": {"y": 1}}'),
            ("force", "True"),
            ("ratio", "1e-3"),
        ),
        calls=(("write", {"flags": ["a", "b"], "options": {"x": {"y": 1}}, "force": True, "ratio": 1e-3}),),
        tools=_TOOLS,
    ),
    Example(
        _call(
            "write", ("limit", "null"), ("path", "42"), ("flags", "[oops"), ("other", "7"), ("more", "seven")
        ),
        calls=(("write", {"limit": None, "path": "42", "flags": "[oops", "other": 7, "more": "seven"}),),
        tools=_TOOLS,
    ),
    Example(
        _call("write", ("text", _SCRIPTS), ("path", "")),
        calls=(("write", {"text": _SCRIPTS, "path": ""}),),
        tools=_TOOLS,
    ),
    Example(
        "<tool_call><function=get_weather><parameter=city>Lisbon</parameter></function></tool_call>ok",
        "ok",
        calls=(("get_weather", {"city": "Lisbon"}),),
        tools=_TOOLS,
    ),
    Example("<function=now>\n</function>\n</tool_call>", calls=(("now", {}),), tools=_TOOLS),
    Example("<function=no_such>\n</function>", "<function=no_such>\n</function>", tools=_TOOLS),
    Example(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nLisbon\n</function>\n</tool_call>",
        calls=(("get_weather", {"city": "Lisbon"}),),
        tools=_TOOLS,
    ),
    Example("<tool_call>\n<function=now>\n</tool_call>", calls=(("now", {}),), tools=_TOOLS),
    Example(_WEATHER, _WEATHER),  # no tools on offer
    Example("Use <tool_call> and <function= so.", "Use <tool_call> and <function= so.", tools=_TOOLS),
    Example(
        "A\n\n<tool_call>\n<function=get weather>", "A\n\n<tool_call>\n<function=get weather>", tools=_TOOLS
    ),
    Example(f"<tool_call>\n{_WEATHER}", "<tool_call>", calls=(_LISBON,), tools=_TOOLS),
    Example("half <tool_call>\n<function=no", "half <tool_call>\n<function=no", tools=_TOOLS),
)
