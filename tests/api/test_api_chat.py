"""Chat completions as the official client sees them: whole, streamed, with tools and log probs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from scripted_llm import finish, info, say, think_then_call

from freetoken.chat.events import TextDelta, TokenLogprobs
from freetoken.core.errors import DeviceError

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def collect(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client puts together from a stream, by choice."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            got = out.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": {}, "tokens": [], "reasons": []}
            )
            got["content"] += choice.delta.content or ""
            got["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for call in choice.delta.tool_calls or []:
                entry = got["calls"].setdefault(
                    call.index, {"id": call.id, "name": call.function.name, "args": ""}
                )
                assert call.id in (None, entry["id"])
                entry["args"] += call.function.arguments or ""
            if choice.logprobs:
                got["tokens"] += choice.logprobs.content
            if choice.finish_reason:
                got["reasons"].append(choice.finish_reason)
    return out


def test_a_whole_answer_has_text_usage_and_the_asked_models_name(serve):
    answer = serve().client.chat.completions.create(model="any/name", messages=HI)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "any/name"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
    }


@pytest.mark.parametrize("script", [lambda _: think_then_call(), lambda _: say("a", "b", top=2)])
def test_a_stream_gives_what_the_whole_answer_gives(serve, script):
    client = serve(script).client
    fields = {"model": "m", "messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields).choices[0]
    stream = list(client.chat.completions.create(**fields, stream=True))
    got = collect(stream)[0]
    assert got["content"] == (whole.message.content or "")
    assert got["reasoning"] == (whole.message.model_extra or {}).get("reasoning_content", "")
    calls = [(c["id"], c["name"], c["args"]) for _, c in sorted(got["calls"].items())]
    assert calls == [(c.id, c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
    assert got["tokens"] == whole.logprobs.content
    assert got["reasons"] == [whole.finish_reason]
    assert len({chunk.id for chunk in stream}) == 1


def test_two_calls_in_one_turn_assemble_in_the_official_client(serve):
    client = serve(lambda _: think_then_call()).client
    with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    calls = final.message.tool_calls
    assert [c.function.name for c in calls] == ["weather", "clock"]
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Oslo"}, {}]


def test_the_wire_follows_the_chunk_grammar(serve):
    reply = serve(lambda _: think_then_call()).chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert '"tool_calls":[]' not in reply.text


def test_a_usage_chunk_comes_only_when_asked_for(serve):
    served = serve()
    assert "usage" not in served.chat(stream=True).text
    assert served.chat(stream=True, stream_options={"include_usage": True}).text.count('"usage"') == 1


def test_n_choices_are_complete_and_differ_by_seed(serve):
    served = serve(lambda asked: say("seed ", str(asked.params.seed)))
    fields = {"model": "m", "messages": HI, "n": 2, "seed": 40}
    whole = served.client.chat.completions.create(**fields)
    assert [c.message.content for c in whole.choices] == ["seed 40", "seed 41"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 4)
    got = collect(list(served.client.chat.completions.create(**fields, stream=True)))
    assert {i: c["content"] for i, c in got.items()} == {0: "seed 40", 1: "seed 41"}
    assert all(c["reasons"] == ["stop"] for c in got.values())
    assert len({a.request_id for a in served.llm.asked}) == 4


def test_as_many_log_probs_as_tokens_also_for_tokens_without_text(serve):
    steps = [TokenLogprobs((info("a"),)), TextDelta("a"), TokenLogprobs((info("<end>"),)), finish(tokens=2)]
    client = serve(lambda _: steps).client
    fields = {"model": "m", "messages": HI, "logprobs": True}
    whole = client.chat.completions.create(**fields)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 2
    assert len(collect(list(client.chat.completions.create(**fields, stream=True)))[0]["tokens"]) == 2
    assert client.chat.completions.create(model="m", messages=HI).choices[0].logprobs is None


def test_fields_reach_the_model(serve):
    served = serve()
    served.client.chat.completions.create(
        model="m",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        tools=TOOLS,
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -3},
        stop=["END"],
        seed=1,
        max_completion_tokens=11,
        logprobs=True,
        top_logprobs=4,
        extra_body={
            "top_k": -1,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "thinking_budget": 9,
            "chat_template_kwargs": {"enable_thinking": False, "style": "dry"},
            "service_tier": "flex",
        },
    )
    asked = served.llm.asked[0]
    params, conversation = asked.params, asked.prompt
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant", "tool"]
    assert conversation.messages[2].tool_calls[0].name == "weather"
    assert [t.name for t in conversation.tools] == ["weather"]
    assert conversation.parallel_tool_calls is False
    assert conversation.thinking is False and params.thinking == "off"
    assert conversation.think_budget == params.thinking_budget == 9
    assert conversation.template_kwargs == {"style": "dry"}
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.logit_bias, params.stop, params.seed) == ({5: -3.0}, ["END"], 1)
    assert (params.max_tokens, params.logprobs, params.ignore_eos) == (11, 4, True)


def test_what_is_left_out_is_the_servers_to_decide(serve):
    served = serve()
    served.chat(temperature=None, stop=None, tools=None)
    params = served.llm.asked[0].params
    assert (params.temperature, params.max_tokens, params.seed, params.thinking) == (None, None, None, None)
    assert (params.stop, params.logprobs, served.llm.asked[0].prompt.thinking) == ([], None, None)


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
    ],
)
def test_each_way_to_switch_thinking_is_understood(serve, fields, thinking):
    served = serve()
    assert served.chat(**fields).status_code == 200
    asked = served.llm.asked[0]
    assert asked.prompt.thinking is thinking
    assert asked.params.thinking == {None: None, True: "on", False: "off"}[thinking]
    assert asked.params.thinking_budget == fields.get("thinking", {}).get("budget_tokens")


def test_tool_choice_none_offers_no_tools(serve):
    served = serve()
    served.chat(tools=TOOLS, tool_choice="none")
    assert served.llm.asked[0].prompt.offered_tools == ()


def test_a_failure_before_the_first_event_is_an_http_error_on_both_paths(serve):
    served = serve(lambda _: [DeviceError("The GPU fell off.", hint="Restart the server.")])
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            served.client.chat.completions.create(model="m", messages=HI, stream=stream)
        assert caught.value.code == "device_failed"
        assert "Restart the server." in caught.value.message


def test_a_failure_in_mid_stream_raises_in_the_client_after_the_text_before_it(serve):
    served = serve(lambda _: [TextDelta("half"), 0.05, DeviceError("The GPU fell off.")])
    seen = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in served.client.chat.completions.create(model="m", messages=HI, stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert seen == "half"
    assert caught.value.code == "device_failed"


@pytest.mark.parametrize(("reason", "status"), [("abort", 503), ("error", 500)])
def test_an_answer_that_was_cut_by_the_server_is_never_passed_off_as_complete(serve, reason, status):
    served = serve(lambda _: [TextDelta("half"), finish(reason)])
    assert served.chat().status_code == status
    assert '"error"' in served.chat(stream=True).text


async def test_the_async_client_streams_many_answers_at_once(serve):
    served = serve(lambda _: [TextDelta("a"), 0.02, TextDelta("b"), 0.02, *say("c")])
    async with openai.AsyncOpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(*(one() for _ in range(30))) == ["abc"] * 30
    assert served.llm.wait_until_idle()


def test_a_silent_stream_is_kept_alive_by_comments(serve):
    served = serve(lambda _: [0.35, *say("late")], keep_alive_s=0.1)
    text = served.chat(stream=True).text
    assert text.count(": keep-alive\n\n") >= 2
    assert '"late"' in text
    stream = served.client.chat.completions.create(model="m", messages=HI, stream=True)
    assert collect(list(stream))[0]["content"] == "late"
