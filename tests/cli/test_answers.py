"""Showing answers, running tools, keeping the conversation."""

from __future__ import annotations

import argparse
import io

import pytest
from scripted_session import ScriptedSession, ScriptedStream, call, text

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import Event, Finish, ReasoningDelta, TextDelta, Usage
from freetoken.cli import chat
from freetoken.cli._terminal import Terminal
from freetoken.cli._tools import CALCULATOR, OFFERED, calculate, run_tool
from freetoken.cli._turn import Turn
from freetoken.cli._view import AnswerView, Shown, figures, hit_rate
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams

THOUGHT: list[Event] = [
    ReasoningDelta("hm\n"),
    ReasoningDelta("yes"),
    TextDelta("\n\nHi"),
    TextDelta(" you"),
    Finish("stop", Usage(3, 9)),
]


def show(events: list[Event], thinking: str = "fold", indent: str = "") -> tuple[str, Shown]:
    pipe = io.StringIO()
    shown = AnswerView(Terminal(pipe), thinking=thinking, indent=indent).show(ScriptedStream(events))
    return pipe.getvalue(), shown


def test_thinking_is_folded_to_one_line() -> None:
    said, shown = show(THOUGHT)
    assert said.startswith("(thought for ") and said.endswith(" s)\nHi you\n")
    assert shown.answer.reasoning == "hm\nyes" and shown.tokens == 9


def test_thinking_can_be_shown_or_hidden() -> None:
    assert show(THOUGHT, "show")[0] == "hm\nyes\nHi you\n"
    assert show(THOUGHT, "hide")[0] == "Hi you\n"


def test_text_is_indented_on_every_line() -> None:
    assert show(text("a\nb", "c"), indent="  ")[0] == "  a\n  bc\n"


def test_a_call_is_shown_in_one_line() -> None:
    assert show(call("calculator", '{"expression": "1+1"}'))[0] == '-> calculator({"expression": "1+1"})\n'


def test_ctrl_c_cancels_the_stream_and_keeps_what_was_said() -> None:
    stream = ScriptedStream([TextDelta("Once"), KeyboardInterrupt()])
    pipe = io.StringIO()
    shown = AnswerView(Terminal(pipe)).show(stream)
    assert stream.cancelled and shown.interrupted and shown.answer.content == "Once"
    assert "stopped" in figures(shown, None)


def test_figures_name_tokens_and_hits() -> None:
    shown = show(text("a", tokens=42))[1]
    assert figures(shown, 0.925).startswith("42 tokens · ") and "92 % expert hits" in figures(shown, 0.925)


def test_hits_are_those_of_this_answer() -> None:
    slots = {"memory": {"slots": 9}}
    before = {"experts": {"hits": 10, "misses": 10}, **slots}
    after = {"experts": {"hits": 40, "misses": 20}, **slots}
    assert hit_rate(before, after) == 0.75
    assert hit_rate(after, after) is None
    assert hit_rate({}, {}) is None
    assert hit_rate(before, {**after, "memory": {"slots": 0}}) is None


def turn(session: ScriptedSession) -> tuple[Turn, io.StringIO]:
    pipe = io.StringIO()
    return Turn(session, GenerateParams(), Terminal(pipe)), pipe


def hello() -> Conversation:
    return Conversation((Message.make("user", "2+3?"),))


def test_a_tool_call_is_run_and_its_result_goes_back() -> None:
    session = ScriptedSession(call("calculator", '{"expression": "2+3"}'), text("It is 5."))
    t, pipe = turn(session)
    t.tools = OFFERED
    messages = t.run(hello())
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2].content == "5" and messages[2].tool_call_id == "call_1"
    assert messages[1].tool_calls[0].arguments == {"expression": "2+3"}
    assert session.asked[1][0].tools == OFFERED and t.calls == 1
    assert "<- 5\n" in pipe.getvalue()


def test_a_model_that_calls_forever_is_stopped() -> None:
    session = ScriptedSession(*[call("calculator", '{"expression": "2+3"}')] * 50)
    t, _ = turn(session)
    t.run(hello())
    assert len(session.asked) == 6


def test_a_call_that_broke_off_is_not_run() -> None:
    session = ScriptedSession(call("calculator", '{"expression": ', complete=False))
    t, _ = turn(session)
    messages = t.run(hello())
    assert t.calls == 0 and messages[-1].tool_calls == ()


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("48*73", "3504"), ("1/4", "0.25"), ("6/3", "2"), ("2^10", "1024"), ("-(2-5)", "3"),
     ("1,000 * 2", "2000"), ("7 // 2", "3"), ("7 % 4", "3")],
)  # fmt: skip
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "9**9**9", "1/0", "2 +", "a", "(-8)**0.5", "1" * 300, "[1][0]", "True + 1", "'a'*9"],
)
def test_the_calculator_refuses_in_words(expression: str) -> None:
    assert run_tool(CALCULATOR.name, '{"expression": "%s"}' % expression).startswith("error: ")  # noqa: UP031


def test_unknown_tools_and_bad_arguments_are_told_to_the_model() -> None:
    assert run_tool("rm", "{}").startswith("error: there is no tool")
    assert run_tool(CALCULATOR.name, "nonsense").startswith("error: ")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('define {"word": "River "}', "river (noun): a large natural stream of water"),
        ('lookup {"query": "Portugal"}', "its capital is Lisbon"),
        ('lookup {"query": "xyzzy"}', "not found"),
        ('define {"query": "river"}', "error: define needs word"),
    ],
)
def test_words_and_places_are_looked_up_in_the_shipped_dictionary(call: str, said: str) -> None:
    name, arguments = call.split(" ", 1)
    assert said in run_tool(name, arguments)


def room(session: ScriptedSession) -> tuple[chat._Room, io.StringIO]:
    pipe = io.StringIO()
    args = argparse.Namespace(tools=False, system=None)
    return chat._Room(session, GenerateParams(), Terminal(pipe), args), pipe


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    left = list(lines)

    def read(prompt: str) -> str:
        line = left.pop(0) if left else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_a_sitting_remembers_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(text("one"), text("two"), text("three"))
    talk, _ = room(session)
    typed(monkeypatch, "a", "b", "/reset", "c")
    assert talk.talk() == 0
    assert [len(asked.messages) for asked, _ in session.asked] == [1, 3, 1]


def test_commands_of_a_sitting(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(text("ok"))
    session.counters = {"experts": {"hits": 3}}
    talk, pipe = room(session)
    typed(
        monkeypatch, "/help", "/tools on", "/think off", "/think hide", "/system Be brief", "/stats",
        "/thnk", KeyboardInterrupt(), "first \\", "second", "/exit", "never",
    )  # fmt: skip
    assert talk.talk() == 0
    asked, params = session.asked[0]
    assert asked.messages[0].content == "Be brief" and asked.messages[1].content == "first \nsecond"
    assert asked.tools == OFFERED and params.thinking == "off"
    said = pipe.getvalue()
    assert all(command in said for command in chat.COMMANDS)
    assert "experts.hits" in said and "Did you mean /think" in said and "Ctrl-D" in said


def test_an_error_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession([RequestError("too much", code="busy", hint="Wait.")], text("fine"))
    talk, pipe = room(session)
    typed(monkeypatch, "a", "b")
    assert talk.talk() == 0
    assert "error [busy]" in pipe.getvalue() and "Wait." in pipe.getvalue()
    assert [m.content for m in session.asked[1][0].messages] == ["b"]
