"""Every spelling of a wished form arrives as one AnswerFormat, on each route."""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.chat.conversation import AnswerFormat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": TOOL}


def asked(served: Any, path: str, **fields: Any) -> Any:
    reply = served.http.post(path, json={"model": "m", "max_tokens": 9, **fields})
    assert reply.status_code == 200, reply.text
    return served.llm.asked[-1].prompt


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
    ],
)
def test_chat_understands_each_spelling(serve, fields, kind, value):
    found = asked(serve(), "/v1/chat/completions", messages=USER, **fields).answer_format
    assert (found.kind, found.value) == (kind, value)


def test_responses_and_messages_have_their_own_places(serve):
    served = serve()
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    found = asked(served, "/v1/responses", input="Hi", text={"format": flat}).answer_format
    assert found == AnswerFormat("json_schema", SCHEMA, "text.format")
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = asked(served, "/v1/messages", messages=USER, output_config=output).answer_format
    assert found == AnswerFormat("json_schema", SCHEMA, "output_config.format")


def test_free_text_is_no_form(serve):
    served = serve()
    assert asked(served, "/v1/chat/completions", messages=USER).answer_format is None
    text = {"format": {"type": "text"}, "verbosity": "low"}
    assert asked(served, "/v1/responses", input="Hi", text=text).answer_format is None
    assert (
        asked(served, "/v1/messages", messages=USER, output_config={"effort": "high"}).answer_format is None
    )


NAMED = ("named", "f")
CHOICES = [
    ("/v1/chat/completions", {"messages": USER, "tools": [CHAT_TOOL]}, "required", ("required", None)),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [CHAT_TOOL]},
        {"type": "function", "function": {"name": "f"}},
        NAMED,
    ),
    (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **TOOL}]},
        "required",
        ("required", None),
    ),
    (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **TOOL}]},
        {"type": "function", "name": "f"},
        NAMED,
    ),
    (
        "/v1/messages",
        {"messages": USER, "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]},
        {"type": "any"},
        ("required", None),
    ),
    (
        "/v1/messages",
        {"messages": USER, "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]},
        {"type": "tool", "name": "f"},
        NAMED,
    ),
]


@pytest.mark.parametrize(("path", "fields", "choice", "expected"), CHOICES)
def test_forced_calls_and_strict_tools_arrive(serve, path, fields, choice, expected):
    conversation = asked(serve(), path, **fields, tool_choice=choice)
    assert (conversation.tool_choice, conversation.forced_tool) == expected
    assert conversation.tools[0].strict and conversation.tools[0].parameters == SCHEMA
