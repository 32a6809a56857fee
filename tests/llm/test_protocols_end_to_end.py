"""The demo model does a task with a tool in each protocol, streamed and whole, through a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from freetoken.api.server import serving
from freetoken.core.options import Options
from freetoken.llm import build_llm

ASKED = "How many pages does the book have? Look it up."
RESULT = "The book has 214 pages."
NAME, ABOUT = "look_up", "Looks a fact up."
SCHEMA = {
    "type": "object",
    "properties": {"subject": {"enum": ["book", "film"]}},
    "required": ["subject"],
    "additionalProperties": False,
}
FUNCTION = {"name": NAME, "description": ABOUT, "parameters": SCHEMA, "strict": True}
MOST = 120


@dataclass(frozen=True)
class Peers:
    """The official clients of one server."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    options = Options(port=0, device="cpu", moe_backend="fused", thinking="off", drain_seconds=1.0)
    llm = build_llm(options)
    try:
        with (
            serving(llm, options) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as chat,
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as messages,
        ):
            yield Peers(chat, messages)
    finally:
        llm.close()


def by_chat(peers: Peers, stream: bool) -> tuple[dict[str, Any], str, str]:
    client = peers.openai

    def ask(messages: list[Any], **more: Any) -> Any:
        fields = {"model": "m", "messages": messages, "max_tokens": MOST, "temperature": 0}
        fields |= {"tools": [{"type": "function", "function": FUNCTION}], **more}
        if not stream:
            return client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as events:
            return events.get_final_completion().choices[0]

    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = ask(messages, tool_choice="required", parallel_tool_calls=False)
    call = first.message.tool_calls[0]
    answered = {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    last = ask([*messages, answered, result], tool_choice="none")
    assert first.finish_reason == "tool_calls"
    return json.loads(call.function.arguments), last.message.content, last.finish_reason


def by_responses(peers: Peers, stream: bool) -> tuple[dict[str, Any], str, str]:
    client = peers.openai

    def ask(**more: Any) -> Any:
        fields = {"model": "m", "max_output_tokens": MOST, "temperature": 0, **more}
        fields["tools"] = [{"type": "function", **FUNCTION}]
        if not stream:
            return client.responses.create(**fields)
        with client.responses.stream(**fields) as events:
            return events.get_final_response()

    first = ask(input=ASKED, tool_choice="required", parallel_tool_calls=False)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    last = ask(input=[result], previous_response_id=first.id, tool_choice="none")
    return json.loads(call.arguments), last.output_text, last.status


def by_messages(peers: Peers, stream: bool) -> tuple[dict[str, Any], str, str]:
    client = peers.anthropic

    def ask(messages: list[Any], choice: dict[str, Any]) -> Any:
        tool = {"name": NAME, "description": ABOUT, "input_schema": SCHEMA, "strict": True}
        fields = {"model": "m", "messages": messages, "max_tokens": MOST}
        fields |= {"tools": [tool], "tool_choice": choice, "extra_body": {"temperature": 0}}
        if not stream:
            return client.messages.create(**fields)
        with client.messages.stream(**fields) as events:
            return events.get_final_message()

    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = ask(messages, {"type": "tool", "name": NAME})
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    answered = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    last = ask([*messages, answered, {"role": "user", "content": [result]}], {"type": "none"})
    assert first.stop_reason == "tool_use"
    return call.input, "".join(b.text for b in last.content if b.type == "text"), last.stop_reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("protocol", [by_chat, by_responses, by_messages])
def test_the_demo_model_calls_a_tool_and_answers_from_its_result(peers, protocol, stream):
    arguments, text, ended = protocol(peers, stream)
    assert arguments["subject"] in ("book", "film")
    assert text.strip(), "nothing was said about the result"
    assert ended in ("stop", "completed", "end_turn", "length", "incomplete", "max_tokens")


def test_each_protocol_makes_the_same_prompt_of_the_same_conversation(peers):
    chat = peers.openai.chat.completions.create(
        model="m",
        max_tokens=1,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}],
    )
    response = peers.openai.responses.create(
        model="m", max_output_tokens=1, instructions="Be brief.", input=ASKED
    )
    user = [{"role": "user", "content": ASKED}]
    counted = peers.anthropic.messages.count_tokens(model="m", system="Be brief.", messages=user)  # type: ignore[arg-type]
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens
