"""Stop strings, held text, and calls that end early or go wrong."""

from __future__ import annotations

import json
import re

import pytest

from freetoken.chat.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    fold,
)
from freetoken.chat.parsers import plain, qwen_json, qwen_xml
from freetoken.chat.parsers._example import tool
from freetoken.chat.stream_parser import StreamParser

TOOLS = (tool("write", path="string", n="integer"), tool("now"))
BROKEN_OFF = "<tool_call>\n<function=write>\n<parameter=path>\n/tmp"


def chars(parser: StreamParser, text: str) -> list[Event]:
    return [event for char in text for event in parser.feed(char)] + parser.finish()


@pytest.mark.parametrize("cut", range(len("Hello wor\nUser: x") + 1))
def test_a_stop_string_ends_content_wherever_it_is_cut(cut: int) -> None:
    text = "Hello wor\nUser: x"
    parser = StreamParser(plain.GRAMMAR, stop=["\nUser:", "never"])
    answer = fold([*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()])
    assert (answer.content, parser.stop_match, parser.done) == ("Hello wor", "\nUser:", True)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    parser = StreamParser(plain.GRAMMAR, stop=["END."])
    assert parser.feed("the E") == [TextDelta("the")]
    assert parser.feed("N") == []
    assert parser.feed("D game") == [TextDelta(" END game")]
    assert parser.feed("EN") == []
    assert parser.finish() == [TextDelta("EN")]
    assert parser.stop_match is None


def test_stop_strings_are_not_looked_for_in_thoughts_or_calls() -> None:
    parser = StreamParser(qwen_xml.GRAMMAR, tools=TOOLS, stop=["\n", "/"], in_thinking=True)
    text = f"a\nb/c\n</think>\n\n{BROKEN_OFF}\n</parameter>\n</function>\n</tool_call>\ndone/ more"
    answer = fold(chars(parser, text))
    assert (answer.reasoning, answer.content, parser.stop_match) == ("a\nb/c", "done", "/")
    assert json.loads(answer.tool_calls[0].arguments) == {"path": "/tmp"}


def test_a_held_stop_prefix_does_not_split_the_end_of_thinking() -> None:
    parser = StreamParser(qwen_xml.GRAMMAR, stop=["</thing>", "</"], in_thinking=True)
    answer = fold(chars(parser, "hm</think>ok </x"))
    assert (answer.reasoning, answer.content, parser.stop_match) == ("hm", "ok ", "</")


def test_nothing_comes_after_a_stop_string() -> None:
    parser = StreamParser(plain.GRAMMAR, stop=["."])
    assert fold([*parser.feed("a. b"), *parser.feed("c. d"), *parser.finish()]).content == "a"


def test_arguments_stream_while_the_value_is_written() -> None:
    parser = StreamParser(qwen_xml.GRAMMAR, tools=TOOLS, new_id=lambda: "call_x")
    assert parser.feed("<tool_call>\n<function=write>") == [ToolCallStart(0, "call_x", "write")]
    assert parser.feed("\n<parameter=path>\n/tm") == [ToolCallDelta(0, '{"path": "/tm')]
    assert parser.feed('p "q"\n') == [ToolCallDelta(0, 'p \\"q\\"')]
    assert parser.feed("</param") == []
    assert parser.feed("eter>\n<parameter=n>\n4") == [ToolCallDelta(0, '", "n": ')]
    assert parser.feed("2\n</parameter>\n</function>") == [ToolCallDelta(0, "42}"), ToolCallEnd(0)]


def test_json_arguments_stream_too() -> None:
    parser = StreamParser(qwen_json.GRAMMAR, tools=TOOLS, new_id=lambda: "call_x")
    assert parser.feed('<tool_call>\n{"name": "write", "argu') == []
    assert parser.feed('ments": {"path": "/t') == [
        ToolCallStart(0, "call_x", "write"),
        ToolCallDelta(0, '{"path": "/t'),
    ]
    assert parser.feed('mp"}}') == [ToolCallDelta(0, 'mp"}'), ToolCallEnd(0)]


def test_a_call_without_parameters_sends_an_empty_object() -> None:
    for parsed in (
        qwen_xml.parse("<tool_call>\n<function=now>\n</function>\n</tool_call>", TOOLS),
        qwen_json.parse('<tool_call>\n{"name": "now"}\n</tool_call>', TOOLS),
    ):
        assert [call.arguments for call in parsed.tool_calls] == ["{}"]


@pytest.mark.parametrize("ending", ["", "\n</param", "\n</parameter>\n<parameter=n>\n4", "\n</parameter>"])
def test_a_call_cut_off_in_its_arguments_is_marked_and_does_not_parse(ending: str) -> None:
    answer = fold(chars(StreamParser(qwen_xml.GRAMMAR, tools=TOOLS), BROKEN_OFF + ending))
    (call,) = answer.tool_calls
    assert not call.complete and call.arguments.startswith('{"path": "/tmp')
    with pytest.raises(ValueError):
        json.loads(call.arguments)


def test_json_that_goes_wrong_after_its_announcement_is_marked() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call> and on'
    answer = fold(chars(StreamParser(qwen_json.GRAMMAR, tools=TOOLS), text))
    assert [call.complete for call in answer.tool_calls] == [False]
    assert "and on" in answer.content


def test_ids_are_unique_and_indices_rise() -> None:
    call = "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
    events = chars(StreamParser(qwen_xml.GRAMMAR, tools=TOOLS), call * 40)
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == list(range(40))
    assert len({start.id for start in starts}) == 40
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", start.id) for start in starts)


@pytest.mark.parametrize("module", [qwen_xml, qwen_json])
def test_one_call_is_enough_where_parallel_calls_are_off(module: object) -> None:
    parser = StreamParser(module.GRAMMAR, tools=TOOLS, parallel=False)  # type: ignore[attr-defined]
    body = {qwen_xml: "<function=now>\n</function>", qwen_json: '{"name": "now"}'}[module]  # type: ignore[index]
    answer = fold(chars(parser, f"One.\n<tool_call>\n{body}\n</tool_call>\n" * 2))
    assert parser.done and len(answer.tool_calls) == 1 and answer.content == "One."


def test_the_channel_follows_the_text() -> None:
    parser = StreamParser(qwen_xml.GRAMMAR, tools=TOOLS, in_thinking=True)
    seen = []
    for piece in ("hm", "</think>", "a", "<tool_call>", "\n<function=now>", "</function>\n</tool_call>"):
        seen.append(parser.channel)
        parser.feed(piece)
    assert seen == ["reasoning", "reasoning", "content", "content", "tool", "tool"]
    assert parser.channel == "content"


def test_a_thought_opens_only_before_the_first_word() -> None:
    answer = fold(chars(StreamParser(qwen_xml.GRAMMAR), "\n<think>a</think>Write <think> to think.</think>"))
    assert (answer.reasoning, answer.content) == ("a", "Write <think> to think.</think>")


def test_one_feed_gives_few_events() -> None:
    parser = StreamParser(qwen_xml.GRAMMAR, in_thinking=True)
    assert parser.feed("a < b </thin c </think> x <tool y") == [
        ReasoningDelta("a < b </thin c"),
        TextDelta(" x <tool y"),
    ]
