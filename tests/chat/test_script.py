"""Scripted models: the line that fits is chosen, and reads back as it was meant."""

from __future__ import annotations

import json

import pytest

from freetoken.chat import parsers
from freetoken.chat.conversation import Conversation, Message, Tool
from freetoken.chat.script import Script
from freetoken.chat.stream_parser import parse_whole
from freetoken.core import choices
from freetoken.core.errors import ConfigError, RequestError

FORMATS = [choices.load(parsers.__name__, name) for name in parsers.names()]
WITH_CALLS = [m for m in FORMATS if m.GRAMMAR.write_call is not None]
TOOLS = (Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}}), Tool("read"))


def script(tmp_path, *lines) -> Script:
    file = tmp_path / "script.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    return Script.from_file(file)


def conversation(*roles: str, last: str = "x", tools: tuple[Tool, ...] = TOOLS) -> Conversation:
    turns = [Message(role, "x") for role in roles[:-1]]  # type: ignore[arg-type]
    return Conversation((*turns, Message(roles[-1], last)), tools)  # type: ignore[arg-type]


def test_the_first_line_that_fits_is_said(tmp_path):
    played = script(
        tmp_path,
        {"when": {"tools": False}, "say": "title"},
        {"when": {"answers": 0, "tool": "bash"}, "say": "first"},
        {"when": {"answers": 1, "results": 1, "last": "^rain"}, "say": "second"},
        {"when": {"answers": 2}, "say": "third"},
    )

    def said(*roles, **more):
        return played.answer(conversation(*roles, **more), FORMATS[0].GRAMMAR, in_thinking=False)

    assert said("user", tools=()).endswith("title")
    assert said("system", "user").endswith("first")
    assert said("user", "assistant", "tool", last="rain today").endswith("second")
    assert said("user", "assistant", "user", "assistant", "user").endswith("third")
    with pytest.raises(RequestError) as caught:
        said("user", "assistant", "tool", last="sun")
    assert caught.value.code == "script_has_no_line"


@pytest.mark.parametrize("module", WITH_CALLS, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize("in_thinking", [True, False])
def test_a_line_reads_back_as_it_was_meant(tmp_path, module, in_thinking):
    arguments = {"command": "cat <<'E'\n</x>\n\nE", "n": 3, "list": [1, "a"]}
    line = {
        "think": "Hm.",
        "say": "I look.",
        "calls": [{"name": "bash", "arguments": arguments}, {"name": "read"}],
    }
    text = script(tmp_path, line).answer(conversation("user"), module.GRAMMAR, in_thinking=in_thinking)
    answer = parse_whole(module.GRAMMAR, text, TOOLS, in_thinking)
    assert (answer.reasoning, answer.content) == ("Hm.", "I look.")
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == [
        ("bash", arguments),
        ("read", {}),
    ]
    bare = script(tmp_path, {"calls": [{"name": "read"}]})
    silent = parse_whole(
        module.GRAMMAR,
        bare.answer(conversation("user"), module.GRAMMAR, in_thinking=in_thinking),
        TOOLS,
        in_thinking,
    )
    assert (silent.reasoning, silent.content, len(silent.tool_calls)) == ("", "", 1)


@pytest.mark.parametrize("module", WITH_CALLS, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_what_a_format_writes_as_calls_it_reads_as_the_same_calls(module):
    for example in module.EXAMPLES:
        text = "\n".join(module.GRAMMAR.write_call(name, arguments) for name, arguments in example.calls)
        answer = module.parse(text, example.tools)
        assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == [
            (name, dict(arguments)) for name, arguments in example.calls
        ]


@pytest.mark.parametrize(
    "text", ["{", '{"says": "x"}', '{"when": {"turn": 1}}', '{"when": {"last": "("}}', '{"calls": [{}]}']
)
def test_a_wrong_line_is_named(tmp_path, text):
    file = tmp_path / "script.jsonl"
    file.write_text('{"say": "ok"}\n' + text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Script.from_file(file)
    assert caught.value.code == "invalid_script" and "line 2" in caught.value.message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Script.from_file(tmp_path / "nothing.jsonl")
    assert caught.value.code == "unreadable_file"
