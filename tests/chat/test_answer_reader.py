"""Sampled ids to events: text, thoughts, calls, usage and the reason of the end."""

from __future__ import annotations

import functools
import json

import pytest
import vocabularies

from freetoken.chat.codec import AnswerReader, ChatCodec
from freetoken.chat.conversation import Conversation, Message, Tool
from freetoken.chat.events import Answer, Event, Finish, TextDelta, TokenLogprobs, fold
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core.request import FinishReason, Output, TokenLogprob

USER = Message("user", "Hi")
TOOLS = (Tool("now"), Tool("say", "", {"type": "object", "properties": {"text": {"type": "string"}}}))
CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
EMOJI = "\U0001f469\u200d\U0001f4bb \ud55c\uae00 \u05e9\u05dc\u05d5\u05dd"


@functools.cache
def demo() -> ChatCodec:
    return ChatCodec.from_directory(vocabularies.DEMO)


def start(
    asked: Conversation | None = None, stop: tuple[str, ...] = (), logprobs: bool = False
) -> AnswerReader:
    asked = asked or Conversation((USER,), tools=TOOLS)
    return demo().reader(asked, demo().encode(asked), stop=stop, logprobs=logprobs)


def ids_of(text: str) -> list[int]:
    return demo().tokenizer.encode(text).tolist()


def read(
    reader: AnswerReader, ids: list[int], size: int = 1, finish: FinishReason = FinishReason.STOP
) -> list[Event]:
    events: list[Event] = []
    for i in range(0, len(ids), size):
        last = i + size >= len(ids)
        events += reader.feed(Output("r", tuple(ids[i : i + size]), finish=finish if last else None))
    return events


def reason(events: list[Event]) -> str:
    assert [isinstance(event, Finish) for event in events].count(True) == 1
    last = events[-1]
    assert isinstance(last, Finish)
    return last.reason


TEXTS = [
    f"hm {EMOJI}\n</think>\n\n{EMOJI} done.<|im_end|>",
    f"hm\n</think>\n\nI look.\n\n{CALL}\n{CALL}<|im_end|>",
    f"</think>\n\n<tool_call>\n<function=say>\n<parameter=text>\n{EMOJI}\n</parameter>\n</function>\n</tool_call>",
    "only a thought",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_grouping_of_tokens_gives_the_same_answer(text: str) -> None:
    def parts(answer: Answer) -> tuple[object, ...]:
        calls = [(call.name, call.arguments, call.complete) for call in answer.tool_calls]
        return answer.content, answer.reasoning, calls, answer.finish

    ids = ids_of(text)
    whole = fold(read(start(), ids, len(ids)))
    for size in (1, 2, 3, 5):
        assert parts(fold(read(start(), ids, size))) == parts(whole)


def test_thoughts_content_and_usage_come_apart() -> None:
    ids = ids_of(TEXTS[0])
    answer = fold(read(start(), ids))
    assert (answer.reasoning, answer.content) == (f"hm {EMOJI}", f"{EMOJI} done.")
    assert answer.finish is not None
    usage = answer.finish.usage
    assert (
        usage.prompt_tokens
        == start().prompt_tokens
        == len(demo().encode(Conversation((USER,), tools=TOOLS)).ids)
    )
    assert usage.completion_tokens == len(ids)
    assert usage.reasoning_tokens == ids.index(8187) + 1


def test_a_stop_id_is_no_text_even_if_it_is_not_special() -> None:
    closing = demo().tokenizer.id_of("</tool_response>")
    assert closing is not None
    ending = ChatCodec(Tokenizer(vocabularies.demo(), [closing]), demo().template)
    reader = ending.text_reader(ending.tokenizer.encode("x"))
    assert fold(read(reader, ids_of("Done.</tool_response>"))).content == "Done."


def test_cached_tokens_are_reported() -> None:
    reader = start()
    reader.feed(Output("r", (), cached_tokens=7))
    events = reader.feed(Output("r", tuple(ids_of("x")), finish=FinishReason.LENGTH))
    assert isinstance(events[-1], Finish) and events[-1].usage.cached_tokens == 7


def test_calls_end_an_answer_as_tool_calls() -> None:
    assert reason(read(start(), ids_of(TEXTS[1]))) == "tool_calls"
    assert reason(read(start(), ids_of(TEXTS[0]))) == "stop"
    assert reason(read(start(), ids_of(TEXTS[1]), finish=FinishReason.LENGTH)) == "length"
    assert reason(read(start(), ids_of(TEXTS[1])[:-9], finish=FinishReason.ABORT)) == "abort"


def test_a_stop_string_ends_the_answer_at_once() -> None:
    reader = start(stop=(" done",))
    events = read(reader, [*ids_of(TEXTS[0]), *ids_of(" more")])
    finish = events[-1]
    assert isinstance(finish, Finish) and (finish.reason, finish.stop) == ("stop", " done")
    assert fold(events).content == EMOJI and reader.done
    assert reader.feed(Output("r", tuple(ids_of("x")), finish=FinishReason.ABORT)) == []


def test_the_first_call_ends_the_answer_where_parallel_calls_are_off() -> None:
    asked = Conversation((USER,), tools=TOOLS, parallel_tool_calls=False)
    reader = start(asked)
    answer = fold(read(reader, ids_of(TEXTS[1]), finish=FinishReason.LENGTH))
    assert len(answer.tool_calls) == 1 and answer.finish is not None and answer.finish.reason == "tool_calls"


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_forced_end_of_thinking_is_read_as_ids(tokens: int) -> None:
    """Under a budget the engine puts the end of thinking in; none of it reaches the content."""
    asked = Conversation((USER,), think_budget=tokens)
    prompt = demo().encode(asked)
    assert prompt.think is not None
    thought = ids_of("one two three four five six")[:tokens]
    ids = [*thought, *prompt.think.forced_ids, *ids_of("So: yes.<|im_end|>")]
    answer = fold(read(start(asked), ids))
    assert answer.content == "So: yes."
    assert answer.reasoning == demo().tokenizer.decode(thought).strip()


def test_an_end_of_thinking_forced_into_half_a_character_stays_clean() -> None:
    ids = [*ids_of("\U0001f469")[:2], *ids_of("\n</think>\n\nok")]
    answer = fold(read(start(), ids))
    assert (answer.reasoning, answer.content) == ("\ufffd", "ok")


def test_with_thinking_off_all_text_is_content() -> None:
    answer = fold(read(start(Conversation((USER,), thinking=False)), ids_of("Hello there.<|im_end|>")))
    assert (answer.content, answer.reasoning) == ("Hello there.", "")


def test_an_answer_cut_in_a_character_or_a_marker_releases_what_it_has() -> None:
    ids = [*ids_of("</think>ok <tool"), *ids_of("\U0001f469")[:-1]]
    assert fold(read(start(), ids, finish=FinishReason.LENGTH)).content == "ok <tool\ufffd"


def test_there_is_one_log_probability_a_token_in_order() -> None:
    ids = ids_of(TEXTS[0])
    reader = start(logprobs=True)
    events: list[Event] = []
    for i, id_ in enumerate(ids):
        logprob = TokenLogprob(-0.5 * i, ((id_, -0.5 * i), (7, -9.0)))
        finish = FinishReason.STOP if i == len(ids) - 1 else None
        events += reader.feed(Output("r", (id_,), (logprob,), finish))
    answer = fold(events)
    assert [info.id for info in answer.logprobs] == ids
    assert b"".join(info.bytes for info in answer.logprobs).decode() == TEXTS[0]
    assert answer.logprobs[2].logprob == -1.0 and [top.id for top in answer.logprobs[2].top] == [ids[2], 7]
    channels = [event.channel for event in events if isinstance(event, TokenLogprobs)]
    assert channels == sorted(channels, reverse=True) and set(channels) == {"content", "reasoning"}


def test_log_probabilities_stay_away_unless_asked_for() -> None:
    events = start().feed(Output("r", (5,), (TokenLogprob(-1.0),)))
    assert not any(isinstance(event, TokenLogprobs) for event in events)


def test_plain_text_is_read_without_thoughts_or_calls() -> None:
    reader = demo().text_reader(demo().tokenizer.encode("Once"), stop=["!"])
    events = read(reader, ids_of(f"<think>a</think>{CALL} end! more"))
    assert fold(events).content == f"<think>a</think>{CALL} end" and reader.prompt_tokens == len(
        ids_of("Once")
    )


def test_plain_text_streams_as_it_comes() -> None:
    reader = demo().text_reader(demo().tokenizer.encode("x"))
    assert reader.feed(Output("r", tuple(ids_of("a")))) == [TextDelta("a")]


def test_arguments_of_streamed_calls_parse() -> None:
    answer = fold(read(start(), ids_of(TEXTS[2])))
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"text": EMOJI}]


def test_ending_twice_gives_one_finish() -> None:
    reader = start()
    assert reason(reader.finish("abort")) == "abort"
    assert reader.finish("stop") == [] and reader.feed(Output("r", (5,))) == []
