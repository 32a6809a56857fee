"""The Messages API as the official client and the stream's grammar see it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import anthropic_grammar
import frames
import httpx
import pytest
from scripted_llm import finish, say, think_then_call

from freetoken.chat.events import Finish, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from freetoken.chat.events import Usage as Counts
from freetoken.chat.nonces import without_nonces
from freetoken.core.errors import ContextLengthError, DeviceError

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}]
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
BROKEN = [ToolCallStart(0, "c", "weather"), ToolCallDelta(0, '{"city": "Os'), ToolCallEnd(0, complete=False)]


def ask(served: Any, **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 100, "messages": HI, **fields}
    return served.http.post("/v1/messages", json=body)


def client_of(served: Any, **more: Any) -> anthropic.Anthropic:
    """A client that is closed with its server."""
    wishes = {"api_key": "x", **more}
    return served.stack.enter_context(
        anthropic.Anthropic(base_url=served.base, max_retries=0, timeout=10, **wishes)
    )


SCRIPTS = {
    "text": lambda: say("Hel", "lo"),
    "thoughts and two calls": think_then_call,
    "nothing": lambda: [finish()],
    "cut in a call": lambda: [TextDelta("Look"), *BROKEN, finish("length", tokens=100)],
    "cut by the context": lambda: say("Hel", reason="length"),
    "a stop string": lambda: [TextDelta("Hel"), Finish("stop", Counts(7, 2), stop="lo")],
    "thoughts between texts": lambda: [ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c"), finish()],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_follows_the_grammar_and_tells_what_the_whole_answer_tells(serve, name):
    served = serve(lambda _: SCRIPTS[name]())
    told = anthropic_grammar.check(ask(served, stream=True).text)
    whole = ask(served).json()
    assert {**told, "id": ""} == {**whole, "id": ""}


def test_the_official_client_gets_blocks_usage_and_stop_reason_streamed_and_whole(serve):
    client = client_of(serve(lambda _: think_then_call()))
    fields: dict[str, Any] = {"model": "any", "max_tokens": 100, "messages": HI, "tools": TOOLS}
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (streamed, client.messages.create(**fields)):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        thinking, text, first, second = message.content
        assert (thinking.thinking, text.text) == ("They want weather.", "Let me look.")
        assert thinking.signature
        assert (first.name, first.input, second.input) == ("weather", {"city": "Oslo"}, {})
        assert message.stop_reason == "tool_use"
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 4, 21)
        assert usage.output_tokens_details.thinking_tokens == 5


@pytest.mark.parametrize(
    ("name", "reason", "sequence"),
    [
        ("text", "end_turn", None),
        ("cut in a call", "max_tokens", None),
        ("cut by the context", "model_context_window_exceeded", None),
        ("a stop string", "stop_sequence", "lo"),
    ],
)
def test_stop_reasons(serve, name, reason, sequence):
    answer = ask(serve(lambda _: SCRIPTS[name]())).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_every_kind_of_history_becomes_neutral_turns(serve):
    served = serve()
    reply = ask(
        served,
        system=[
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli;",
            },
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": ""}]},
            {"role": "system", "content": [{"type": "text", "text": "Late", "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    CALL,
                    {**CALL, "id": "t2", "name": "clock", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"tool_use_id": "t1", "type": "tool_result", "content": "rain", "is_error": False},
                    {
                        "tool_use_id": "t2",
                        "type": "tool_result",
                        "content": [{"type": "text", "text": "no clock"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        thinking={"type": "enabled", "budget_tokens": 9},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert reply.status_code == 200, reply.text
    asked = served.llm.asked[0]
    conversation, params = asked.prompt, asked.params
    turns = [(m.role, m.content) for m in without_nonces(conversation.messages)]
    assert turns == [
        ("system", "Be brief.\nBe kind."),
        ("user", "One"),
        ("system", "Late"),
        ("assistant", "I look."),
        ("tool", "rain"),
        ("tool", "Error: no clock"),
        ("user", "Go on."),
    ]
    answer, result = conversation.messages[3], conversation.messages[5]
    assert answer.reasoning == "Hm." and [c.name for c in answer.tool_calls] == ["weather", "clock"]
    assert (result.tool_call_id, result.name) == ("t2", "clock")
    assert [t.name for t in conversation.tools] == ["weather"]
    assert (conversation.parallel_tool_calls, conversation.thinking, conversation.think_budget) == (
        False,
        True,
        9,
    )
    assert (params.stop, params.temperature, params.top_k, params.max_tokens) == (["END"], 0.5, 3, 100)


def test_a_string_and_one_text_block_give_the_same_conversation(serve):
    served = serve()
    ask(served, system="Be brief.", messages=HI)
    block = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    ask(served, system=[{"type": "text", "text": "Be brief."}], messages=[{"role": "user", "content": block}])
    assert served.llm.asked[0].prompt == served.llm.asked[1].prompt


@pytest.mark.parametrize("as_blocks", [True, False])
def test_the_billing_line_leads_the_system_turn_where_the_codec_drops_it(serve, as_blocks):
    served = serve()
    line = "x-anthropic-billing-header: cc_version=2.1.170.1f2; cc_entrypoint=cli; cch=0a1b2;"
    both = [{"type": "text", "text": line}, {"type": "text", "text": "Rest"}]
    ask(served, system=both if as_blocks else f"{line}\nRest")
    turns = served.llm.asked[0].prompt.messages
    assert [m.content for m in turns] == [f"{line}\nRest", "Hi"]
    assert [m.content for m in without_nonces(turns)] == ["Rest", "Hi"]


def test_omitted_thoughts_come_back_through_their_signature(serve):
    served = serve(lambda _: think_then_call())
    answer = ask(served, thinking={"type": "adaptive", "display": "omitted"}).json()
    stream = ask(served, thinking={"type": "adaptive", "display": "omitted"}, stream=True).text
    assert anthropic_grammar.check(stream)["content"] == answer["content"]
    assert answer["content"][0]["thinking"] == ""
    assert "They want" not in stream
    ask(served, messages=[*HI, {"role": "assistant", "content": answer["content"]}, *HI])
    assert served.llm.asked[-1].prompt.messages[1].reasoning == "They want weather."


@pytest.mark.parametrize("signature", ["", "made up", "ft1.###", "ft1.AAAA"])
def test_foreign_signatures_are_taken_as_they_come(serve, signature):
    served = serve()
    block = {"type": "thinking", "thinking": "", "signature": signature}
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "A"}]}
    assert ask(served, messages=[*HI, turn, *HI]).status_code == 200
    assert served.llm.asked[0].prompt.messages[1].reasoning == ""


def test_deferred_tools_are_offered_once_something_named_them(serve):
    served = serve()
    tools = [*TOOLS, {**TOOLS[0], "name": "late", "defer_loading": True}]
    found = {"type": "tool_reference", "tool_name": "late"}
    history = [
        *HI,
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [found]}]},
    ]
    ask(served, tools=tools)
    ask(served, tools=tools, messages=history)
    assert [[t.name for t in a.prompt.tools] for a in served.llm.asked] == [["weather"], ["weather", "late"]]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "unsupported_content"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [CALL]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}],
                    },
                ]
            },
            "unsupported_content",
        ),
        ({"messages": []}, "empty_messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "So"}]}, "unsupported_prefill"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_role"),
        ({"max_tokens": 0}, "out_of_range"),
        ({"max_tokens": None}, "invalid_type"),
        ({"temperature": 3}, "out_of_range"),
        ({"tools": [{"type": "computer_20250124", "name": "c"}]}, "unsupported_tool"),
        ({"thinking": {"type": "maybe"}}, "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
            "invalid_content",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(serve, fields, code):
    reply = ask(serve(), **fields)
    body = reply.json()
    assert reply.status_code == 400
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", code)
    assert reply.headers["request-id"]


def test_an_over_long_prompt_is_worded_so_that_agents_compact(serve):
    served = serve(lambda _: [ContextLengthError(5000, 4096)])
    with pytest.raises(anthropic.BadRequestError) as caught:
        client_of(served).messages.create(model="m", max_tokens=10, messages=HI)  # type: ignore[arg-type]
    assert caught.value.body["error"]["message"] == "prompt is too long: 5000 tokens > 4095 maximum"


def test_max_tokens_is_a_cap_and_never_refused_for_being_large(serve):
    served = serve()
    assert ask(served, max_tokens=4000).status_code == 200
    assert served.llm.asked[0].params.clip_max_tokens


def test_keys_are_taken_from_either_header_and_refused_in_shape(serve):
    served = serve(api_key="secret")
    fields: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": HI}
    assert client_of(served, api_key="secret").messages.create(**fields).content
    assert client_of(served, api_key=None, auth_token="secret").messages.create(**fields).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client_of(served, api_key="wrong").messages.create(**fields)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_count_tokens_runs_nothing_and_needs_no_max_tokens(serve):
    served = serve()
    counted = client_of(served).messages.count_tokens(model="m", messages=HI, system="Be brief.", tools=TOOLS)  # type: ignore[arg-type]
    assert counted.input_tokens == 7
    assert not served.llm.live
    assert [m.role for m in served.llm.asked[0].prompt.messages] == ["system", "user"]


def test_an_agents_probes_are_answered(serve):
    served = serve()
    assert served.http.head("/api/hello").status_code == 200
    assert served.http.head("/").status_code == 200
    beta = {"anthropic-beta": "claude-code-20250219,made-up-2031-01-01", "anthropic-version": "2023-06-01"}
    body = {"model": "m", "max_tokens": 5, "messages": HI}
    assert served.http.post("/v1/messages?beta=true", json=body, headers=beta).status_code == 200
    assert served.http.get("/v1/messages").json()["error"]["code"] == "method_not_allowed"


def test_the_model_list_reads_in_both_clients(serve):
    served = serve()
    assert [m.id for m in client_of(served).models.list()] == ["scripted"]
    assert [m.id for m in served.client.models.list()] == ["scripted"]


def test_a_failure_in_mid_stream_is_an_error_event(serve):
    served = serve(lambda _: [TextDelta("half"), 0.05, DeviceError("The GPU fell off.")])
    events = frames.events_of(ask(served, stream=True).text)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    with (
        pytest.raises(anthropic.APIStatusError),
        client_of(served).messages.stream(
            model="m",
            max_tokens=10,
            messages=HI,  # type: ignore[arg-type]
        ) as stream,
    ):
        stream.until_done()


def test_a_silent_stream_opens_early_and_pings(serve):
    served = serve(lambda _: [0.35, *say("late")], keep_alive_s=0.1)
    text = ask(served, stream=True).text
    kinds = [event["type"] for event in frames.events_of(text)]
    assert kinds[:2] == ["message_start", "ping"]
    assert anthropic_grammar.check(text)["content"] == [{"type": "text", "text": "late"}]


def test_pieces_that_a_slow_reader_left_are_merged(serve):
    served = serve(lambda _: say(*["a"] * 500))
    text = ask(served, stream=True).text
    assert anthropic_grammar.check(text)["content"] == [{"type": "text", "text": "a" * 500}]
    assert json.dumps(text).count("text_delta") < 500
