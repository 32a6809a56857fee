"""Merging choices and rendering chunks, away from any socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_llm import HANG, ScriptedGeneration, ScriptedLLM, Step, finish, info, say

from freetoken.api.choices import Choices
from freetoken.api.openai_chat_answer import ChatRenderer
from freetoken.api.openai_completions import CompletionRenderer
from freetoken.chat.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from freetoken.core.errors import BusyError, DeviceError

WORDS = st.text("ab é", min_size=1, max_size=3)


def generations(*scripts: list[Step]) -> list[ScriptedGeneration]:
    llm = ScriptedLLM()
    return [ScriptedGeneration(llm, steps) for steps in scripts]


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """One answer: thoughts, text and calls in any number, with log probs strewn between."""
    events: list[Event] = [ReasoningDelta(w) for w in draw(st.lists(WORDS, max_size=3))]
    for call in range(draw(st.integers(0, 3))):
        events += [TextDelta(w) for w in draw(st.lists(WORDS, max_size=3))]
        events.append(ToolCallStart(call, f"call_{call}", f"f{call}"))
        events += [ToolCallDelta(call, w) for w in draw(st.lists(WORDS, max_size=3))]
        events.append(ToolCallEnd(call))
    events += [TextDelta(w) for w in draw(st.lists(WORDS, max_size=3))]
    for at in sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)), reverse=True):
        events.insert(at, TokenLogprobs((info(f"t{at}", top=1),)))
    return [*events, finish(draw(st.sampled_from(["stop", "length", "tool_calls"])))]


@st.composite
def batches(draw: st.DrawFn) -> list[list[tuple[int, Event]]]:
    """Two answers interleaved in any way and cut into batches in any way."""
    queues = [draw(answers()), draw(answers())]
    merged: list[tuple[int, Event]] = []
    while any(queues):
        index = draw(st.sampled_from([i for i, q in enumerate(queues) if q]))
        merged.append((index, queues[index].pop(0)))
    cuts = sorted(draw(st.lists(st.integers(0, len(merged)), max_size=6)))
    return [merged[a:b] for a, b in zip([0, *cuts], [*cuts, len(merged)], strict=True)]


def renderer(stream: bool) -> ChatRenderer:
    return ChatRenderer("id", "m", 2, logprobs=True, stream=stream, usage=False)


def assemble(frames: list[bytes]) -> list[dict[str, Any]]:
    """Choices as a strict client puts them together; breaks of the chunk grammar fail here."""
    out: dict[int, dict[str, Any]] = {}
    for choice in (c for frame in frames for c in json.loads(frame)["choices"]):
        index, delta = choice["index"], choice["delta"]
        if index not in out:
            assert delta == {"role": "assistant", "content": ""}
            out[index] = {"content": "", "reasoning": "", "calls": [], "tokens": [], "finish": None}
        got = out[index]
        assert got["finish"] is None and delta.get("tool_calls") != []
        got["content"] += delta.get("content", "")
        got["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(got["calls"]) and call["function"]["arguments"] == ""
                got["calls"].append([call["id"], call["function"]["name"], ""])
            got["calls"][call["index"]][2] += call["function"]["arguments"]
        got["tokens"] += (choice["logprobs"] or {"content": []})["content"]
        got["finish"] = choice["finish_reason"]
    return [out[i] for i in sorted(out)]


@given(batches())
def test_any_stream_assembles_to_the_whole_answer(pieces):
    streaming, whole = renderer(True), renderer(False)
    frames = [frame for batch in pieces for frame in streaming.feed(batch)]
    for batch in pieces:
        assert whole.feed(batch) == []
    choices = json.loads(whole.whole(Usage()))["choices"]
    expected = [
        {
            "content": c["message"]["content"] or "",
            "reasoning": c["message"].get("reasoning_content", ""),
            "calls": [
                [t["id"], t["function"]["name"], t["function"]["arguments"]]
                for t in c["message"].get("tool_calls", [])
            ],
            "tokens": c["logprobs"]["content"],
            "finish": c["finish_reason"],
        }
        for c in choices
    ]
    assert assemble(frames) == expected


@given(batches())
def test_any_streamed_completion_assembles_to_the_whole_one(pieces):
    fields: dict[str, Any] = {"top": 1, "usage": False}
    streaming = CompletionRenderer("id", "m", ["echo ", ""], stream=True, **fields)
    whole = CompletionRenderer("id", "m", ["echo ", ""], stream=False, **fields)
    for batch in pieces:
        whole.feed(batch)
    got: dict[int, list[Any]] = {0: ["", [], []], 1: ["", [], []]}
    for frame in (f for batch in pieces for f in streaming.feed(batch)):
        for c in json.loads(frame)["choices"]:
            got[c["index"]][0] += c["text"]
            got[c["index"]][1] += c["logprobs"]["tokens"]
            got[c["index"]][2] += c["logprobs"]["text_offset"]
    choices = json.loads(whole.whole(Usage()))["choices"]
    assert [got[i] for i in (0, 1)] == [
        [c["text"], c["logprobs"]["tokens"], c["logprobs"]["text_offset"]] for c in choices
    ]


def test_pieces_that_wait_together_become_one_chunk():
    words = [(0, TextDelta(w)) for w in ("a", "b", "c")]
    frames = renderer(True).feed(words)
    assert [json.loads(f)["choices"][0]["delta"].get("content") for f in frames] == ["", "abc"]


async def test_events_of_all_choices_come_in_one_batch_when_they_wait_together():
    choices = Choices(generations(say("a"), say("b")))
    batch = await choices.take()
    assert {index for index, _ in batch} == {0, 1}
    assert choices.done
    assert choices.usage == Usage(7, 2)
    await choices.close()


async def test_what_arrives_while_the_writer_is_busy_comes_as_one_batch():
    steps = [step for word in say("a", "b", "c") for step in (word, 0.001)]
    choices = Choices(generations(steps))
    while not choices.usage.completion_tokens:
        await asyncio.sleep(0.001)
    assert [event for _, event in await choices.take()] == say("a", "b", "c")
    await choices.close()


async def test_waiting_ends_after_the_timeout_with_nothing():
    choices = Choices(generations([HANG]))
    assert await choices.take(0.02) == []
    assert not choices.done
    await choices.close()


async def test_closing_cancels_what_runs_and_leaves_no_task():
    running = generations([TextDelta("a"), HANG], say("b"))
    choices = Choices(running)
    await choices.take()
    await choices.close()
    await choices.close()
    assert running[0].cancelled.is_set() and not running[1].cancelled.is_set()
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_task_cancels_its_generations():
    running = generations([HANG])
    choices = Choices(running)
    await choices.take(0.01)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert running[0].cancelled.is_set()


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([TextDelta("a"), DeviceError("gone")], DeviceError),
        ([TextDelta("a"), finish("abort")], BusyError),
        ([TextDelta("a"), finish("error")], DeviceError),
        ([TextDelta("a")], BusyError),
    ],
)
async def test_a_broken_answer_gives_its_text_and_then_raises(steps, kind):
    choices = Choices(generations(steps))
    assert await choices.take() == [(0, TextDelta("a"))]
    assert not choices.done
    with pytest.raises(kind):
        await choices.take()
    await choices.close()


async def test_one_broken_choice_ends_the_others():
    running = generations([0.01, DeviceError("gone")], [HANG])
    choices = Choices(running)
    with pytest.raises(DeviceError):
        await choices.take()
    await choices.close()
    assert running[1].cancelled.is_set()
