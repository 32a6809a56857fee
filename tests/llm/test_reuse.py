"""What earlier prompts computed is used again, end to end, and usage and statistics say how much."""

from dataclasses import replace

import numpy as np
import pytest

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import fold
from freetoken.core.errors import ConfigError
from freetoken.core.generate import GenerateParams, PrefixReport
from freetoken.core.options import Options
from freetoken.llm import LLM, build_llm

GREEDY = GenerateParams(temperature=0.0, max_tokens=12, thinking="off")


@pytest.fixture(scope="module")
def llm():
    llm = build_llm(Options(device="cpu", moe_backend="fused", exact=True))
    yield llm
    llm.close()


def say(llm: LLM, name: str, *texts: str, params: GenerateParams = GREEDY):
    roles = ("user", "assistant")
    turns = tuple(Message.make(roles[i % 2], text) for i, text in enumerate(texts))
    answer = fold(llm.submit_chat(Conversation(turns), params, name))
    return answer.content, answer.finish.usage


def test_the_next_turn_pays_for_its_own_tokens_only(llm):
    question = "Tell me a joke about the sea, the wind and an old boat that nobody wants to sail."
    said, first = say(llm, "one", question)
    assert first.cached_tokens == 0
    again, second = say(llm, "two", question)
    assert again == said and 0 < first.prompt_tokens - second.cached_tokens <= 16
    _, third = say(llm, "three", question, said, "Another one, please.")
    assert third.cached_tokens >= first.prompt_tokens - 16
    assert third.prompt_tokens > third.cached_tokens


def test_statistics_count_what_was_reused(llm):
    before = llm.stats()
    question = "What is the weather like at the end of the world, and who would know?"
    say(llm, "a", question)
    _, usage = say(llm, "b", question)
    after = llm.stats()
    assert after["engine"]["cached_tokens"] - before["engine"]["cached_tokens"] == usage.cached_tokens > 0
    assert after["cache"]["hits"] == before["cache"]["hits"] + 1
    assert after["cache"]["pages"] > before["cache"]["pages"] and after["cache"]["checkpoints"] > 0


def test_several_answers_to_one_prompt_share_its_computation(llm):
    question = "Name a colour and say why you like it more than all the other colours that there are."
    params = replace(GREEDY, temperature=0.7)
    turns = Conversation((Message.make("user", question),))
    running = [llm.submit_chat(turns, replace(params, seed=i), f"n{i}") for i in range(3)]
    cached = [fold(generation).finish.usage.cached_tokens for generation in running]
    assert cached[0] == 0 and min(cached[1:]) > 0


def test_a_page_size_that_no_kernel_knows_is_refused():
    with pytest.raises(ConfigError) as e:
        build_llm(Options(device="cpu", page_size=24))
    assert e.value.code == "invalid_option" and "16" in (e.value.hint or "")


def test_a_request_knows_why_its_prefix_was_not_reused(llm):
    question = "Which of the boats in the harbour is the oldest, and who has painted it blue? " * 3
    first = say(llm, "w1", question, "The small one.", "Is it really small?")[1]
    turns = tuple(
        Message.make(role, text)
        for role, text in (("user", question), ("assistant", "The long one."), ("user", "Is it?"))
    )
    asked = llm.submit_chat(Conversation(turns), GREEDY, "w2")
    usage = fold(asked).finish.usage
    report = asked.reuse.to_dict()
    assert report["cause"] == "text_changed" and report["where"] == "turn 1 (assistant)", report
    assert report["reused"] == usage.cached_tokens > 0 and report["lost"] <= 64
    assert report["first_difference"] < first.prompt_tokens
    llm.built.engine.scheduler.reuse.clear()
    again = llm.submit_chat(Conversation(turns), GREEDY, "w3")
    fold(again)
    assert again.reuse.to_dict()["cause"] == "evicted" and again.reuse.lost > 64


def test_prompts_that_differ_in_a_known_nonce_share_all_but_the_tail(llm):
    """And they are one conversation, for the fair share of saved states."""
    line, text = (
        "x-anthropic-billing-header: cc_version=2.1; cch={};\n",
        "You mind the harbour's letters. " * 150,
    )
    groups, submit = [], llm.built.engine.submit
    llm.built.engine.submit = lambda what: (groups.append(what.group), submit(what))
    try:
        for i in range(2):
            turns = (Message("system", line.format(i) + text), Message("user", "Who came today?"))
            usage = fold(llm.submit_chat(Conversation(turns), GREEDY, f"n{i}")).finish.usage
    finally:
        llm.built.engine.submit = submit
    assert usage.cached_tokens > 0.99 * usage.prompt_tokens > 600
    assert groups[0] == groups[1] != ""


def test_ids_that_were_asked_before_are_told_too(llm):
    ids = np.arange(300, 700, dtype=np.int32)
    fold(llm.submit_text(ids, GREEDY, "i1"))
    other = ids.copy()
    other[200] = 5
    asked = llm.submit_text(other, GREEDY, "i2")
    fold(asked)
    report = asked.reuse
    assert report.shared == report.matched == 200 and report.edit == "nonce" and report.cause == "no_state"


def test_without_a_prefix_cache_that_is_the_cause(llm):
    assert PrefixReport(prompt=10, is_off=True).cause == "cache_off"
