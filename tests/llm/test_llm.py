"""The LLM's face: streams end once, stops and budgets hold, trouble has a code, nothing is left behind."""

import asyncio
import threading
import time

import numpy as np
import pytest

from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall
from freetoken.chat.events import Finish, ReasoningDelta, fold
from freetoken.core.errors import (
    BusyError,
    ConfigError,
    ContextLengthError,
    FreeTokenError,
    RequestError,
    WeightsError,
)
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL
from freetoken.llm import LLM, build_llm

GREEDY = GenerateParams(temperature=0.0, max_tokens=60, thinking="off")


@pytest.fixture(scope="module")
def llm():
    llm = build_llm(Options(device="cpu", moe_backend="fused", exact=True))
    yield llm
    llm.close()


def ask(text: str, **kw) -> Conversation:
    return Conversation((Message.make("user", text),), **kw)


def idle(llm: LLM) -> bool:
    s = llm.built.engine.scheduler
    return not (s.running or s.waiting) and s.holds_nothing


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come to rest"
        time.sleep(0.01)


def test_a_thread_and_an_event_loop_read_the_same_events(llm):
    whole = list(llm.submit_chat(ask("Tell me a joke."), GREEDY, "sync"))

    async def collect():
        return [e async for e in llm.submit_chat(ask("Tell me a joke."), GREEDY, "async")]

    async_answer, sync_answer = fold(asyncio.run(collect())), fold(whole)
    assert async_answer.content == sync_answer.content != ""
    assert sum(isinstance(e, Finish) for e in whole) == 1 and isinstance(whole[-1], Finish)
    ends = [(f.reason, f.usage.completion_tokens) for f in (async_answer.finish, sync_answer.finish)]
    assert ends[0] == ends[1]


def test_usage_counts_what_was_drawn(llm):
    answer = fold(
        llm.submit_chat(ask("Hi!"), GenerateParams(temperature=0, max_tokens=3, thinking="off"), "u")
    )
    assert answer.finish.reason == "length" and answer.finish.usage.completion_tokens == 3
    assert answer.finish.usage.prompt_tokens > 3


def test_a_stop_string_ends_the_answer_before_it_and_frees_the_engine(llm):
    full = fold(llm.submit_chat(ask("Tell me a joke."), GREEDY, "full")).content
    stop = full[9:14]
    params = GenerateParams(temperature=0, max_tokens=60, thinking="off", stop=[stop])
    answer = fold(llm.submit_chat(ask("Tell me a joke."), params, "stopped"))
    assert answer.content == full[: full.index(stop)].rstrip() and answer.finish.reason == "stop"
    assert answer.finish.stop == stop
    until(lambda: idle(llm))


def test_a_tool_call_comes_out_as_one(llm):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = (Tool("get_weather", "Current weather in a city", schema),)
    answer = fold(llm.submit_chat(ask("What is the weather in Lisbon?", tools=tools), GREEDY, "tool"))
    assert [(c.name, c.complete) for c in answer.tool_calls] == [("get_weather", True)]
    assert answer.tool_calls[0].arguments == '{"city": "Lisbon"}' and answer.finish.reason == "tool_calls"


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thinking_budget_bounds_the_thought_and_the_answer_follows(llm, budget):
    params = GenerateParams(temperature=0, max_tokens=80, thinking="on", thinking_budget=budget)
    events = list(llm.submit_chat(ask("What is 347 + 586?"), params, f"budget{budget}"))
    answer = fold(events)
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert len(llm.tokenizer.encode(thought)) <= budget
    assert answer.content and "</think>" not in answer.content + thought


def test_cancel_ends_a_stream_and_gives_everything_back(llm):
    params = GenerateParams(temperature=0, max_tokens=2000, ignore_eos=True, thinking="off")
    generation = llm.submit_chat(ask("Count."), params, "cancelled")
    events = iter(generation)
    next(events)
    generation.cancel()
    generation.cancel()
    assert list(events)[-1].reason == "abort"
    llm.abort("cancelled")
    llm.abort("never-was")
    until(lambda: idle(llm))


def test_a_duplicate_id_is_refused_while_the_first_runs(llm):
    params = GenerateParams(temperature=0, max_tokens=500, ignore_eos=True)
    first = llm.submit_text("one", params, "same")
    with pytest.raises(RequestError, match="in use"):
        llm.submit_text("two", params, "same")
    first.cancel()
    assert list(first)[-1].reason == "abort"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(-1, None, True), (0, None, False), (1, None, False), (-10, 10, True), (-10, 11, False)],
)
def test_the_context_limit_is_exact_and_said_with_its_numbers(llm, num_prompt, max_tokens, fits):
    limit = llm.max_model_len
    ids = np.full(limit + num_prompt, 5, np.int32)
    params = GenerateParams(temperature=0, max_tokens=max_tokens)
    if fits:
        generation = llm.submit_text(ids, params, "long")
        generation.cancel()
        assert list(generation)[-1].reason == "abort"
        return
    with pytest.raises(ContextLengthError) as e:
        llm.submit_text(ids, params, "long")
    assert (e.value.used, e.value.limit, e.value.max_tokens) == (len(ids), limit, max_tokens or 0)
    assert str(limit) in e.value.message and e.value.param == "prompt"


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_an_answer_of_no_tokens_is_refused_and_not_taken_for_an_endless_one(llm, max_tokens):
    with pytest.raises(RequestError, match="at least one token") as e:
        llm.submit_text("one", GenerateParams(max_tokens=max_tokens), "none")
    assert (e.value.code, e.value.param) == ("out_of_range", "max_tokens")


@pytest.mark.parametrize("limit", [2, 3, 4, 5])
def test_the_smallest_contexts_start_and_answer(limit):
    llm = build_llm(Options(device="cpu", max_model_len=limit, max_running_requests=1))
    params = GenerateParams(temperature=0.0, ignore_eos=True)
    try:
        finish = list(llm.submit_text(np.full(limit - 1, 5, np.int32), params, "small"))[-1]
    finally:
        llm.close()
    assert (finish.reason, finish.usage.completion_tokens) == ("length", 1)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("", "empty_prompt"), (np.array([-1]), "invalid_token_id"), (np.array([10**6]), "invalid_token_id")],
)
def test_bad_prompts_have_codes(llm, prompt, code):
    with pytest.raises(RequestError) as e:
        llm.submit_text(prompt, GREEDY, "bad")
    assert e.value.code == code


def test_the_same_seed_gives_the_same_text_and_another_seed_another(llm):
    def text(seed: int, name: str) -> str:
        params = GenerateParams(temperature=1.5, seed=seed, max_tokens=30, ignore_eos=True)
        return fold(llm.submit_text("The", params, name)).content

    assert text(1, "s1") == text(1, "s2") != text(2, "s3")


def test_logprobs_come_one_a_token(llm):
    params = GenerateParams(temperature=0, max_tokens=5, logprobs=2, thinking="off", ignore_eos=True)
    answer = fold(llm.submit_chat(ask("Hi!"), params, "lp"))
    assert len(answer.logprobs) == 5 and all(len(t.top) == 2 for t in answer.logprobs)


def test_requests_before_loading_and_after_a_failed_load_say_why():
    llm = LLM(Options(model="no/such/model"))
    with pytest.raises(BusyError):
        llm.submit_text("x", GREEDY, "early")
    with pytest.raises(FreeTokenError) as e:
        llm.load()
    assert e.value.code == "unknown_path" and llm.status().state == "failed"
    with pytest.raises(FreeTokenError) as e:
        llm.submit_text("x", GREEDY, "late")
    assert e.value.code == "unknown_path"


def test_drain_refuses_the_new_finishes_the_running_and_leaves_no_thread():
    before = threading.active_count()
    llm = build_llm(Options(device="cpu", moe_backend="fused"))
    generation = llm.submit_text("a", GenerateParams(max_tokens=10, ignore_eos=True), "last")
    asyncio.run(llm.drain(10.0))
    assert list(generation)[-1].reason == "length"
    with pytest.raises(BusyError):
        llm.submit_text("b", GREEDY, "new")
    llm.close()
    llm.close()
    assert threading.active_count() == before


def test_ignoring_the_end_of_a_turn_goes_on_to_the_limit(llm):
    params = GenerateParams(temperature=0, max_tokens=60, thinking="off", ignore_eos=True)
    finish = fold(llm.submit_chat(ask("Who are you?"), params, "endless")).finish
    assert (finish.reason, finish.usage.completion_tokens) == ("length", 60)


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy(llm, temperature):
    params = GenerateParams(temperature=temperature, max_tokens=8, thinking="off")
    answer = fold(llm.submit_chat(ask("Who are you?"), params, f"cold{temperature}"))
    greedy = GenerateParams(temperature=0, max_tokens=8, thinking="off")
    assert answer.content == fold(llm.submit_chat(ask("Who are you?"), greedy, "greedy")).content


def test_a_prompt_as_long_as_the_context_is_told_what_is_missing(llm):
    with pytest.raises(ContextLengthError, match="no room for an answer"):
        llm.submit_text(np.full(llm.max_model_len, 5, np.int32), GenerateParams(), "full-up")


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_read(tmp_path):
    llm = LLM(Options(record_routing=str(tmp_path / "nowhere" / "trace.npz")))
    phases = []
    with pytest.raises(ConfigError, match="cannot be written"):
        llm.load(lambda phase, percent: phases.append(phase))
    assert not phases and llm.status().state == "failed"


@pytest.mark.parametrize("line", ['{"temperature": -5}', '{"top_p": 7}', '{"eos_token_id": "x"}', "{"])
def test_a_damaged_generation_config_is_refused_by_name(line, tmp_path):
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(line)
    with pytest.raises(WeightsError, match="generation_config"):
        LLM(Options(model=str(tmp_path))).load()


@pytest.mark.parametrize("wishes", [{"device": "abacus"}, {"machine": "4090"}])
def test_a_device_that_is_not_there_is_told_what_is(wishes):
    with pytest.raises(ConfigError) as e:
        LLM(Options(**wishes)).load()
    assert "sim" in str(e.value)


@pytest.mark.parametrize("depth", [20, 500, 900, 985])
def test_deeply_nested_arguments_are_served_or_refused_by_name(llm, depth):
    call = ToolCall("a", "f", '{"a":' * depth + "1" + "}" * depth)
    turns = (Message.make("user", "x"), Message.make("assistant", None, tool_calls=[call]))
    try:
        assert llm.count_chat(Conversation(turns), GREEDY) > depth
    except RequestError as e:
        assert e.code == "invalid_content" and depth > 400
