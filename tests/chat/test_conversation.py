"""Whatever a client sends comes to one normal form, or is refused by name."""

from __future__ import annotations

import pytest

from freetoken.chat.conversation import Conversation, Message, Tool, parse_arguments
from freetoken.core.errors import RequestError


@pytest.mark.parametrize(
    "empty", [None, "", [], [""], [{"type": "text", "text": ""}], [{"type": "text", "text": None}]]
)
def test_all_empty_contents_are_equal(empty: object) -> None:
    assert Message.make("assistant", empty) == Message("assistant")


def test_a_string_equals_one_text_block() -> None:
    for part in ({"type": "text", "text": "hi"}, {"type": "input_text", "text": "hi"}, "hi"):
        assert Message.make("user", [part]) == Message.make("user", "hi")


def test_empty_parts_are_dropped_and_the_others_joined_by_lines() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": ""},
        {"type": "output_text", "text": "b"},
    ]
    assert Message.make("user", parts).content == "a\nb"


def test_developer_is_system_and_function_is_tool() -> None:
    assert Message.make("developer", "x") == Message.make("system", "x")
    assert Message.make("function", "x", name="f") == Message.make("tool", "x", name="f")


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "document"])
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_a_part_that_is_not_text_is_refused_by_name(kind: str, role: str) -> None:
    with pytest.raises(RequestError) as caught:
        Message.make(role, ["see:", {"type": kind, kind: {}}], where="messages[3]")
    assert caught.value.code == "unsupported_content"
    assert "messages[3].content[1]" in caught.value.message and repr(kind) in caught.value.message
    assert caught.value.hint and caught.value.param == "messages[3].content[1]"


@pytest.mark.parametrize("content", [3, {"text": "x"}, [{"type": "text", "text": 3}]])
def test_content_of_no_known_form_is_refused(content: object) -> None:
    with pytest.raises(RequestError) as caught:
        Message.make("user", content)
    assert caught.value.code == "invalid_content"


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="assistant") as caught:
        Message.make("robot", "x")
    assert caught.value.code == "invalid_role"


def test_arguments_become_objects_or_stay_raw() -> None:
    assert parse_arguments('{"a": [1]}') == {"a": [1]}
    assert parse_arguments({"a": 1}) == {"a": 1}
    assert parse_arguments("") == parse_arguments(" \n") == {}
    for raw in ("{", "[1]", "null", "3", "[" * 100_000):
        assert parse_arguments(raw) == raw


def test_no_tools_are_on_offer_when_the_choice_is_none() -> None:
    asked = Conversation((), tools=(Tool("f"),))
    assert asked.offered_tools == asked.tools
    assert Conversation((), tools=(Tool("f"),), tool_choice="none").offered_tools == ()
