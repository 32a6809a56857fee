"""Harmony: every piece of an answer is a message with a header that says who speaks in which channel.

The form of gpt-oss. `<|channel|>analysis<|message|>` is a thought, `final` the answer, `commentary` what is
said on the way, or with `to=functions.NAME` a call whose message is the arguments' JSON. `<|end|>` ends a
message, `<|return|>` and `<|call|>` the answer; the prompt has written the first `<|start|>assistant`.
Forgiven: a call in the analysis channel, the recipient before the channel, any type of content. What is no
header is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freetoken.chat.conversation import Tool
from freetoken.chat.events import Answer
from freetoken.chat.grammar import BACK, FAIL, START, THINKING, Calls, Grammar, Sink, State, Think
from freetoken.chat.lark import json_term, literal, parameters_schema
from freetoken.chat.parsers._example import Example, tool
from freetoken.chat.stream_parser import parse_whole

RANK = 30
SPEAKER = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
THINK = Think(
    ANALYSIS,
    "<|end|>",
    forced=lambda tools: f"<|end|>{SPEAKER}{'' if tools else FINAL}",
    late=True,
    inline=False,
)


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    return f"{SPEAKER}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"


def write_answer(thought: str, text: str, calls: Calls, in_thinking: bool) -> str:
    said = []
    if thought or in_thinking:
        said.append(f"{SPEAKER}{ANALYSIS}{thought}<|end|>")
    if text and calls:
        said.append(f"{SPEAKER}{COMMENTARY}{text}<|end|>")
    elif text:
        said.append(f"{SPEAKER}{FINAL}{text}")
    said += [write_call(name, arguments) for name, arguments in calls]
    opened = SPEAKER + ANALYSIS if in_thinking else SPEAKER
    return "".join(said).removeprefix(opened)


def call_rule(tool: Tool, name: str, mark: Callable[[str], str]) -> str:
    recipient = literal(f"commentary to=functions.{tool.name} ")
    return (
        f'{name}: {mark("<|start|>")} "assistant" {mark("<|channel|>")} {recipient} {mark("<|constrain|>")} '
        f'"json" {mark("<|message|>")} {name}_arguments\n'
        f"{name}_arguments: {json_term(parameters_schema(tool))}\n"
    )


def _header(rules: Mapping[str, str]) -> State:
    return State(Sink.HEADER, rules, otherwise=FAIL)


_TYPES = ("<|message|>", "json<|message|>", "<|constrain|>json<|message|>", "text<|message|>")
_BEGINS = {"<|start|>": "role", "<|channel|>": "channel"}
_LEAD = {**_BEGINS, "to=functions.": "name"}
_SPOKEN = {"<|end|>": "ended", **_BEGINS}

GRAMMAR = Grammar(
    {
        START: State(Sink.CONTENT, _LEAD, otherwise="content", resume="lead"),
        "lead": State(Sink.CONTENT, _LEAD, otherwise="content", resume="lead"),
        "content": State(Sink.CONTENT, _SPOKEN, resume="lead"),
        "spoken": State(Sink.CONTENT, _SPOKEN, resume="lead", joint="\n\n"),
        THINKING: State(Sink.REASONING, {"<|end|>": "lead", **_BEGINS}, resume="lead"),
        "ended": _header(_BEGINS),
        "role": _header({"assistant": "speaker"}),
        "speaker": _header({"<|channel|>": "channel", "to=functions.": "name", "<|message|>": "spoken"}),
        "channel": _header({"analysis": "analysis", "commentary": "commentary", "final": "final"}),
        "analysis": _header({**dict.fromkeys(_TYPES, THINKING), "to=functions.": "name"}),
        "commentary": _header({**dict.fromkeys(_TYPES, "spoken"), "to=functions.": "name"}),
        "final": _header(dict.fromkeys(_TYPES, "spoken")),
        "name": State(
            Sink.NAME,
            {"<|message|>": "arguments", " ": "type", "<|channel|>": "type", "<|constrain|>": "type"},
        ),
        "type": State(Sink.NOWHERE, {"<|message|>": "arguments"}),
        "arguments": State(Sink.ARGUMENTS, {}, otherwise="tail"),
        "tail": State(Sink.NOWHERE, {"<|call|>": BACK, "<|end|>": BACK}, otherwise=BACK),
    },
    think=THINK,
    opens=("<|start|>",),
    closes=("<|end|>", "<|call|>"),
    marks=("<|channel|>", "<|constrain|>", "<|message|>"),
    stops=("<|call|>", "<|return|>"),
    calls=frozenset({"name"}),
    one_call=True,
    answer_head=SPEAKER + FINAL,
    efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    write_call=write_call,
    write_answer=write_answer,
    call_rule=call_rule,
)


def detect(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def parse(text: str, tools: Sequence[Tool] = (), *, in_thinking: bool = False) -> Answer:
    """Read a whole answer."""
    return parse_whole(GRAMMAR, text, tools, in_thinking)


_TOOLS = (tool("get_weather", city="string", days="integer"), tool("now"))
_LISBON = ("get_weather", {"city": "Lisbon", "days": 3})
_BODY = '{"city": "Lisbon", "days": 3}'
_WEATHER = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_BODY}<|call|>"
_CODE = 'if a < b: print("<|end|>\\n")\n\n'
_SCRIPTS = "\u4f60\u597d <b>&amp;\u2019 \U0001f469\u200d\U0001f4bb"

EXAMPLES = (
    Example(f"{ANALYSIS}Short.<|end|>{SPEAKER}{FINAL}Hello.", "Hello.", "Short.", tools=_TOOLS),
    Example(f"{ANALYSIS}Short.<|end|>{SPEAKER}{FINAL}Hello.<|return|>", "Hello.<|return|>", "Short."),
    Example(f"{FINAL} \n indented\n", " \n indented\n"),
    Example(f"Thought.<|end|>{SPEAKER}{FINAL}Yes.", "Yes.", "Thought.", in_thinking=True),
    Example(f"<|end|>{SPEAKER}{FINAL}Yes.", "Yes.", in_thinking=True),
    Example(f"{ANALYSIS}Cut off in th", reasoning="Cut off in th"),
    Example(f"{ANALYSIS}A<|end|>{SPEAKER}{ANALYSIS}B<|end|>{SPEAKER}{FINAL}C", "C", "AB"),
    Example(
        f"{ANALYSIS}I look.<|end|>{SPEAKER}{_WEATHER}", reasoning="I look.", calls=(_LISBON,), tools=_TOOLS
    ),
    Example(
        f"{ANALYSIS}Hm.<|end|>{SPEAKER}{COMMENTARY}I look.<|end|>{SPEAKER}{_WEATHER}",
        "I look.",
        "Hm.",
        (_LISBON,),
        _TOOLS,
    ),
    Example(  # the recipient stands with the role
        f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{_BODY}<|call|>",
        calls=(_LISBON,),
        tools=_TOOLS,
    ),
    Example(
        f"{ANALYSIS}Hm.<|end|>{SPEAKER} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>",
        reasoning="Hm.",
        calls=(("now", {}),),
        tools=_TOOLS,
    ),
    Example(  # the wrong channel, an unknown type of content
        f"<|channel|>analysis to=functions.get_weather code<|message|>{_BODY}<|call|>",
        calls=(_LISBON,),
        tools=_TOOLS,
    ),
    Example(  # no type at all, and raw line ends inside a string
        '<|channel|>commentary to=functions.now<|message|>{"a": "x\ny", "b": True, }<|call|>',
        calls=(("now", {"a": "x\ny", "b": True}),),
        tools=_TOOLS,
    ),
    Example(  # two calls, a word between them
        f"{_WEATHER}{SPEAKER}{COMMENTARY}And now.<|end|>{SPEAKER}{_WEATHER}",
        "And now.",
        calls=(_LISBON, _LISBON),
        tools=_TOOLS,
    ),
    Example(f"{COMMENTARY}First I look.<|end|>{SPEAKER}{FINAL}Done.", "First I look.\n\nDone."),
    Example("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
    Example(f"{FINAL}{_CODE}", _CODE),
    Example(f"{FINAL}Say <|channel|> or <|start|>user, a < b.", "Say <|channel|> or <|start|>user, a < b."),
    Example(f"{FINAL}{_SCRIPTS} half <|en", f"{_SCRIPTS} half <|en"),
    Example(f"{FINAL}Done.<|end|>", "Done."),
    Example("Hello without a header.", "Hello without a header.", tools=_TOOLS),
    Example("<|channel|>anal", ""),
    Example(f"{ANALYSIS}Hm.<|end|>{SPEAKER}<|channel|>", reasoning="Hm."),
    Example("<|channel|>mystery<|message|>x", "<|channel|>mystery<|message|>x"),
    Example(_WEATHER, _WEATHER),  # no tools on offer
    Example(f"{FINAL}to=functions.now is text", "to=functions.now is text", tools=_TOOLS),
)
