"""Forms of answers through the real engine: enforced with and without thinking, refused at admission."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freetoken.chat.conversation import AnswerFormat, Conversation, Message, Tool
from freetoken.chat.events import Answer, fold
from freetoken.core.errors import FreeTokenError, RequestError
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.llm import LLM, build_llm

CITY = Tool(
    "city",
    "Looks a city up.",
    {
        "type": "object",
        "properties": {"name": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "maximum": 9}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
)
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    llm = build_llm(Options(device="cpu", moe_backend="fused"))
    yield llm
    llm.close()


def answer(llm: LLM, name: str, *, params: dict[str, Any] | None = None, **asked: Any) -> Answer:
    conversation = Conversation((Message("user", "Tell me something."),), **asked)
    wishes = GenerateParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 300, **(params or {})})
    return fold(llm.submit_chat(conversation, wishes, name))


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_a_schema_holds_for_the_answer_and_not_for_the_thought(llm, thinking):
    asked = {"answer_format": AnswerFormat("json_schema", PAIR)}
    params = {"thinking": thinking, "thinking_budget": 20 if thinking == "on" else None}
    got = answer(llm, f"schema-{thinking}", params=params, **asked)
    value = json.loads(got.content)
    assert set(value) == {"a", "b"} and isinstance(value["a"], bool) and value["b"] in ("x", "y")
    assert got.finish.reason == "stop"
    assert bool(got.reasoning) == (thinking == "on")


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_used_up_thinking_budget_leads_into_the_form(llm, budget):
    asked = {"answer_format": AnswerFormat("choice", ["yes", "no"])}
    got = answer(llm, f"budget-{budget}", params={"thinking": "on", "thinking_budget": budget}, **asked)
    assert got.content in ("yes", "no") and got.finish.reason == "stop"


@pytest.mark.parametrize(
    "asked",
    [{"tool_choice": "required"}, {"tool_choice": "named", "forced_tool": "city"}],
    ids=["any", "named"],
)
def test_a_forced_call_is_made_and_obeys_its_schema(llm, asked):
    got = answer(llm, f"call-{asked['tool_choice']}", tools=(CITY,), parallel_tool_calls=False, **asked)
    assert got.finish.reason == "tool_calls" and got.content == ""
    arguments = json.loads(got.tool_calls[0].arguments)
    assert arguments["name"] in ("Oslo", "Rome") and arguments["size"] <= 9


def test_forms_hold_beside_free_answers_and_penalties(llm):
    asked = Conversation((Message("user", "Hi."),), answer_format=AnswerFormat("regex", "[ab]{12}"))
    free = Conversation((Message("user", "Hi."),))
    params = GenerateParams(max_tokens=20, thinking="off", frequency_penalty=2.0, logit_bias={5: 50.0})
    started = [llm.submit_chat(c, params, f"mix-{i}") for i, c in enumerate([asked, free, asked, free])]
    texts = [fold(generation).content for generation in started]
    assert all(len(text) == 12 and set(text) <= {"a", "b"} for text in texts[::2])


def test_a_form_that_cannot_be_enforced_is_refused_before_anything_runs(llm):
    before = llm.stats()["engine"]["requests"]
    with pytest.raises(RequestError) as caught:
        answer(llm, "bad", answer_format=AnswerFormat("regex", "("))
    assert caught.value.code == "invalid_grammar"
    assert llm.stats()["engine"]["requests"] == before


def test_forced_tokens_that_break_a_form_fail_that_request_alone(tmp_path):
    script = tmp_path / "s.jsonl"
    script.write_text('{"when": {"last": "bad"}, "say": "maybe"}\n{"say": "yes"}\n', encoding="utf-8")
    llm = build_llm(Options(device="cpu", model=f"script:{script}", moe_backend="fused"))
    try:
        form, params = AnswerFormat("choice", ["yes"]), GenerateParams(thinking="off")
        with pytest.raises(FreeTokenError) as caught:
            fold(llm.submit_chat(Conversation((Message("user", "bad"),), answer_format=form), params, "1"))
        assert caught.value.code == "grammar_failed"
        good = Conversation((Message("user", "good"),), answer_format=form)
        assert fold(llm.submit_chat(good, params, "2")).content == "yes"
    finally:
        llm.close()


@pytest.mark.parametrize(
    "options",
    [{"num_tokens": 256, "max_model_len": 240}, {"device": "sim", "moe_backend": "hybrid"}],
    ids=["preempted", "one step behind"],
)
def test_forms_hold_whatever_the_engine_does(options):
    llm = build_llm(Options(**{"device": "cpu", "moe_backend": "fused", **options}))
    items = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 6, "maxItems": 8}
    try:
        started = [
            llm.submit_chat(
                Conversation(
                    (Message("user", "Colours " + "please " * 5 * i),),
                    answer_format=AnswerFormat("json_schema", items),
                ),
                GenerateParams(thinking="off", max_tokens=180, seed=i, temperature=1.0),
                f"r{i}",
            )
            for i in range(4)
        ]
        for generation in started:
            value = json.loads(fold(generation).content)
            assert 6 <= len(value) <= 8 and set(value) <= {"red", "green"}
        assert "num_tokens" not in options or llm.stats()["engine"]["preemptions"] > 0
    finally:
        llm.close()
