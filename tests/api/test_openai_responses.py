"""The Responses API as the official client and the stream's grammar see it."""

from __future__ import annotations

from typing import Any

import frames
import httpx
import openai
import pytest
import responses_grammar
from scripted_llm import finish, info, say, think_then_call

from freetoken.api.response_store import ResponseStore
from freetoken.chat.events import (
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from freetoken.core.errors import ContextLengthError, DeviceError, RequestError

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
SPACE = {
    "type": "namespace",
    "name": "mcp__wiki__",
    "description": "d",
    "tools": [{**WEATHER, "name": "find"}],
}
PATCH = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}


def ask(served: Any, given: Any = "Hi", **fields: Any) -> httpx.Response:
    return served.http.post("/v1/responses", json={"model": "m", "input": given, **fields})


def calls(*named: tuple[str, str]) -> list[Any]:
    steps: list[Any] = []
    for i, (name, arguments) in enumerate(named):
        half = len(arguments) // 2
        steps += [ToolCallStart(i, f"call_{i}", name), ToolCallDelta(i, arguments[:half])]
        steps += [ToolCallDelta(i, arguments[half:]), ToolCallEnd(i)]
    return [*steps, finish("tool_calls")]


SCRIPTS = {
    "text": lambda: say("Hel", "lo"),
    "thoughts, text and two calls": think_then_call,
    "nothing": lambda: [finish()],
    "cut in a text": lambda: say("Hel", "lo", reason="length"),
    "cut in a call": lambda: [
        ToolCallStart(0, "c", "weather"),
        ToolCallDelta(0, '{"a'),
        ToolCallEnd(0, complete=False),
        finish("length"),
    ],
    "thoughts between texts": lambda: [TextDelta("a"), ReasoningDelta("b"), TextDelta("c"), finish()],
    "all kinds of tools": lambda: calls(
        ("weather", "{}"), ("mcp__wiki__find", '{"q": "x"}'), ("patch", '{"input": "*** a\\n"}')
    ),
}
TOOLS = [WEATHER, SPACE, PATCH, {"type": "web_search", "external_web_access": False}]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stream_follows_the_grammar_and_ends_with_the_whole_answer(serve, name):
    served = serve(lambda _: SCRIPTS[name]())
    fields = {"tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    told = responses_grammar.check(ask(served, stream=True, **fields).text)
    whole = ask(served, **fields).json()

    def nameless(response: dict[str, Any]) -> dict[str, Any]:
        output = [{**item, "id": ""} for item in response["output"]]
        return {**response, "id": "", "created_at": 0, "output": output}

    assert nameless(told) == nameless(whole)


def test_the_official_client_accumulates_a_stream(serve):
    served = serve(lambda _: think_then_call())
    with served.client.responses.stream(model="m", input="Hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "Let me look."
    assert (final.output[2].name, final.output[2].arguments) == ("weather", '{"city": "Oslo"}')
    assert final.usage.input_tokens_details.cached_tokens == 4
    assert final.usage.output_tokens_details.reasoning_tokens == 5
    whole = served.client.responses.create(model="m", input="Hi")
    assert (whole.status, whole.output_text) == ("completed", "Let me look.")


def test_calls_come_back_under_the_clients_names(serve):
    output = ask(serve(lambda _: SCRIPTS["all kinds of tools"]()), tools=TOOLS).json()["output"]
    assert [(i["type"], i.get("namespace"), i["name"]) for i in output] == [
        ("function_call", None, "weather"),
        ("function_call", "mcp__wiki__", "find"),
        ("custom_tool_call", None, "patch"),
    ]
    assert output[2]["input"] == "*** a\n"


def test_every_kind_of_item_becomes_a_neutral_turn(serve):
    served = serve()
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"role": "user", "content": "One"},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {
            "type": "function_call",
            "call_id": "b",
            "namespace": "mcp__wiki__",
            "name": "find",
            "arguments": "",
        },
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** x"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "found"}]},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    reply = ask(
        served,
        items,
        instructions="Be brief.",
        tools=TOOLS,
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        max_output_tokens=50,
        prompt_cache_key="k",
        client_metadata={"a": "b"},
    )
    assert reply.status_code == 200, reply.text
    conversation, params = served.llm.asked[0].prompt, served.llm.asked[0].params
    assert [(m.role, m.content) for m in conversation.messages] == [
        ("system", "Be brief."),
        ("system", "Rules."),
        ("user", "One"),
        ("assistant", "I look."),
        ("tool", "rain"),
        ("tool", "found"),
        ("tool", "done"),
        ("user", "Go on."),
    ]
    answer = conversation.messages[3]
    assert answer.reasoning == "Hm."
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [
        ("a", "weather", {"city": "Oslo"}),
        ("b", "mcp__wiki__find", {}),
        ("c", "patch", {"input": "*** x"}),
    ]
    assert [t.name for t in conversation.tools] == ["weather", "mcp__wiki__find", "patch"]
    assert (conversation.thinking, conversation.parallel_tool_calls) == (True, False)
    assert (params.max_tokens, params.clip_max_tokens, params.thinking) == (50, True, "on")


def test_a_stored_response_continues_by_its_id(serve):
    served = serve(lambda _: think_then_call())
    first = served.client.responses.create(model="m", input="One", instructions="Only now.")
    served.client.responses.create(
        model="m",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": "call_a", "output": "rain"}],
    )
    turns = served.llm.asked[-1].prompt.messages
    assert [(m.role, m.content) for m in turns] == [
        ("user", "One"),
        ("assistant", "Let me look."),
        ("tool", "rain"),
    ]
    assert turns[1].reasoning == "They want weather."
    assert turns[2].name == "weather"
    assert served.client.responses.retrieve(first.id).output == first.output
    served.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        served.client.responses.retrieve(first.id)


@pytest.mark.parametrize("store", [True, False])
def test_an_id_that_is_not_stored_is_refused_and_never_ignored(serve, store):
    served = serve()
    given = served.client.responses.create(model="m", input="One", store=store).id
    reply = ask(served, previous_response_id=given if not store else "resp_other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_the_store_is_bounded_in_number_and_bytes():
    store = ResponseStore(max_responses=3, max_bytes=2000)
    for i in range(5):
        store.put(f"r{i}", [i], b"{}")
    assert len(store) == 3 and store.history("r2") == [2]
    store.put("r5", [5], b"{}")
    assert store.history("r2") == [2], "what was used last stays"
    with pytest.raises(RequestError):
        store.history("r3")
    store.put("big", ["x" * 1990], b"{}")
    assert len(store) == 1
    store.put("bigger", ["x" * 3000], b"{}")
    assert store.history("big")


def test_thoughts_return_through_their_encrypted_form(serve):
    served = serve(lambda _: think_then_call())
    output = ask(served, include=["reasoning.encrypted_content"]).json()["output"]
    hidden = {**output[0], "content": []}
    ask(served, [{"role": "user", "content": "One"}, hidden, *output[1:]])
    assert served.llm.asked[-1].prompt.messages[1].reasoning == "They want weather."


def test_log_probs_come_on_request(serve):
    steps = [TokenLogprobs((info("<think>"),), "reasoning"), ReasoningDelta("x"), *say("a", "b", top=2)]
    served = serve(lambda _: steps)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    told = responses_grammar.check(ask(served, stream=True, **fields).text)
    entries = told["output"][1]["content"][0]["logprobs"]
    assert [e["token"] for e in entries] == ["a", "b"] and len(entries[0]["top_logprobs"]) == 2
    assert served.llm.asked[0].params.logprobs == 2
    assert ask(served).json()["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"input": []}, "empty_messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_content"),
        ({"input": ["text"]}, "unsupported_content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "unsupported_content"),
        ({"background": True}, "unsupported_parameter"),
        ({"conversation": "c"}, "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter"),
        ({"tools": [{"type": "made_up"}]}, "unsupported_tool"),
        ({"reasoning": {"effort": "huge"}}, "out_of_range"),
        ({"tool_choice": {"type": "web_search_preview"}}, "unsupported_tool_choice"),
        ({"tool_choice": "maybe"}, "out_of_range"),
        ({"max_output_tokens": 0}, "out_of_range"),
    ],
)
def test_what_cannot_be_honoured_is_refused(serve, fields, code):
    reply = ask(serve(), **{"given": "Hi", **fields} if "input" not in fields else {"given": fields["input"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_only_allowed_tools_are_offered(serve):
    served = serve()
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    ask(served, tools=TOOLS, tool_choice=allowed)
    assert [t.name for t in served.llm.asked[0].prompt.tools] == ["weather"]


def test_an_over_long_prompt_has_the_code_that_agents_know(serve):
    reply = ask(serve(lambda _: [ContextLengthError(5000, 4096)]), stream=True)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_broken_stream_ends_as_failed(serve):
    served = serve(lambda _: [TextDelta("half"), 0.05, DeviceError("The GPU fell off.")])
    told = responses_grammar.check(ask(served, stream=True).text)
    assert (told["status"], told["error"]["code"]) == ("failed", "device_failed")
    assert served.client.responses.create(model="m", input="x", stream=True)


def test_a_silent_stream_opens_early_and_says_that_it_goes_on(serve):
    served = serve(lambda _: [0.35, *say("late")], keep_alive_s=0.1)
    text = ask(served, stream=True).text
    kinds = [event["type"] for event in frames.events_of(text)]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert responses_grammar.check(text)["output"][0]["content"][0]["text"] == "late"
    with served.client.responses.stream(model="m", input="Hi") as stream:
        assert stream.get_final_response().output_text == "late"
