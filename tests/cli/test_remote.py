"""Talking to a server that runs: what goes over the wire comes back as the same events."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest
from scripted_session import call, text

from freetoken.api import server
from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall
from freetoken.chat.events import Event, Finish, ReasoningDelta, TextDelta, Usage, fold
from freetoken.cli._remote import RemoteSession, chunk_events, find_server, request_body
from freetoken.cli._tools import OFFERED
from freetoken.core.errors import BusyError, FreeTokenError, RequestError
from freetoken.core.generate import GenerateParams, PrefixReport, Status
from freetoken.core.options import Options


class ScriptedGeneration:
    prompt_tokens = 4
    reuse = PrefixReport(4)

    def __init__(self, events: Sequence[Event | BaseException]) -> None:
        self.events = events

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def cancel(self) -> None:
        pass


class ScriptedModel:
    """A token source behind the real server."""

    model_name, max_model_len, created, tokenizer = "scripted", 4096, 1, None

    def __init__(self) -> None:
        self.answer: Sequence[Event | BaseException] = ()
        self.asked: list[tuple[Conversation, GenerateParams]] = []

    def status(self) -> Status:
        return Status("ok")

    def submit_chat(self, conversation: Conversation, params: GenerateParams, request_id: str) -> Any:
        self.asked.append((conversation, params))
        return ScriptedGeneration(self.answer)

    def submit_text(self, prompt: Any, params: GenerateParams, request_id: str) -> Any:
        raise NotImplementedError

    def stats(self) -> Mapping[str, Any]:
        return {"experts": {"hits": 3, "misses": 1}}

    async def drain(self, timeout_s: float) -> None:
        pass


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedModel, int]]:
    model = ScriptedModel()
    with server.serving(model, Options(port=0)) as url:
        yield model, int(url.rsplit(":", 1)[1])


def session(port: int) -> RemoteSession:
    found = find_server("127.0.0.1", port)
    assert found is not None
    return found


ANSWERS: list[list[Event]] = [
    [
        ReasoningDelta("hm"),
        TextDelta("Grüße "),
        TextDelta("an \U0001f600"),
        Finish("stop", Usage(4, 9, 2, 1)),
    ],
    text("only text"),
    [Finish("length", Usage(4, 0))],
]


@pytest.mark.parametrize("events", ANSWERS)
def test_an_answer_arrives_as_it_was_given(served: tuple[ScriptedModel, int], events: list[Event]) -> None:
    model, port = served
    model.answer = events
    got = fold(session(port).ask(Conversation((Message.make("user", "x"),)), GenerateParams()))
    want = fold(events)
    assert (got.content, got.reasoning, got.finish) == (want.content, want.reasoning, want.finish)


def test_tool_calls_arrive_with_their_arguments(served: tuple[ScriptedModel, int]) -> None:
    model, port = served
    model.answer = call("calculator", '{"expression": "1+1"}')
    asked = Conversation((Message.make("user", "x"),), tools=OFFERED)
    got = fold(session(port).ask(asked, GenerateParams()))
    assert [(c.name, json.loads(c.arguments), c.complete) for c in got.tool_calls] == [
        ("calculator", {"expression": "1+1"}, True)
    ]
    assert got.finish is not None and got.finish.reason == "tool_calls"


def test_the_request_means_what_was_asked(served: tuple[ScriptedModel, int]) -> None:
    model, port = served
    model.answer = text("ok")
    history = (
        Message.make("system", "Be brief."),
        Message.make("user", "2+3?"),
        Message.make(
            "assistant", "", reasoning="hm", tool_calls=[ToolCall("c1", "calculator", {"expression": "2+3"})]
        ),
        Message.make("tool", "5", tool_call_id="c1"),
    )
    params = GenerateParams(temperature=0.5, top_k=7, max_tokens=9, seed=3, stop=["."], thinking="off")
    fold(session(port).ask(Conversation(history, tools=OFFERED), params))
    conversation, got = model.asked[-1]
    assert [m.content for m in conversation.messages] == [m.content for m in history]
    assert conversation.messages[2].tool_calls[0].name == "calculator"
    assert [t.name for t in conversation.tools] == [tool.name for tool in OFFERED]
    assert (got.temperature, got.top_k, got.max_tokens, got.seed, got.stop, got.thinking) == (
        0.5,
        7,
        9,
        3,
        ["."],
        "off",
    )


def test_counters_come_from_the_server(served: tuple[ScriptedModel, int]) -> None:
    assert session(served[1]).stats()["experts"]["hits"] == 3


def test_a_refused_request_is_an_error_with_its_code(served: tuple[ScriptedModel, int]) -> None:
    empty = session(served[1]).ask(Conversation(()), GenerateParams())
    with pytest.raises(RequestError) as e:
        list(empty)
    assert e.value.code not in ("", "server_error")


def test_an_error_in_the_middle_of_a_stream_is_raised(served: tuple[ScriptedModel, int]) -> None:
    model, port = served
    model.answer = [TextDelta("so"), FreeTokenError("broken", code="device_failed")]
    with pytest.raises(FreeTokenError) as e:
        list(session(port).ask(Conversation((Message.make("user", "x"),)), GenerateParams()))
    assert e.value.code == "device_failed"


def test_no_server_is_no_session() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert find_server("127.0.0.1", probe.getsockname()[1]) is None


def test_a_server_that_went_away_is_an_error_with_a_next_step() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = RemoteSession("127.0.0.1", probe.getsockname()[1], "m")
        with pytest.raises(BusyError) as e:
            list(gone.ask(Conversation((Message.make("user", "x"),)), GenerateParams()))
    assert e.value.code == "server_gone" and e.value.hint
    assert gone.stats() == {}


def test_parallel_calls_keep_their_order() -> None:
    def piece(index: int, **more: Any) -> bytes:
        return json.dumps({"choices": [{"delta": {"tool_calls": [{"index": index, **more}]}}]}).encode()

    lines = [
        piece(0, id="a", function={"name": "f", "arguments": ""}),
        piece(0, function={"arguments": "{}"}),
        piece(1, id="b", function={"name": "g", "arguments": "{}"}),
        b'{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}',
        b"[DONE]",
    ]
    answer = fold(chunk_events(iter(lines)))
    assert [(c.id, c.name, c.arguments, c.complete) for c in answer.tool_calls] == [
        ("a", "f", "{}", True),
        ("b", "g", "{}", True),
    ]


def test_what_the_user_left_open_is_not_sent() -> None:
    body = request_body("m", Conversation((Message.make("user", "x"),)), GenerateParams())
    assert set(body) == {"model", "messages", "stream", "stream_options"}


def test_a_tool_is_sent_in_the_common_shape() -> None:
    body = request_body("m", Conversation((), tools=(Tool("f", "does f"),)), GenerateParams())
    assert body["tools"][0]["type"] == "function" and body["tools"][0]["function"]["name"] == "f"
