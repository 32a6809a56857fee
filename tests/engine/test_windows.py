"""Sliding windows through the whole engine: hits, preemption, resizes and backends change no bit."""

import random
from functools import cache

import numpy as np
import pytest

from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall
from freetoken.chat.events import Answer, fold
from freetoken.chat.parsers import harmony
from freetoken.core.errors import ConfigError
from freetoken.core.request import SamplingParams, Submit
from freetoken.core.units import MIB

from . import sessions, windowed
from .served import Served, Trace, say, serve, text_ids

EXACT = dict(exact=True, device="cpu", moe_backend="fused", max_model_len=2048, num_tokens=8192)
SIM = dict(
    EXACT, device="sim", machine="4060-laptop", gpu_memory=48 * MIB, max_prefill_length=64, num_tokens=None,
    kv_reserve_tokens=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return windowed.write(tmp_path_factory.mktemp("windowed"))


@cache
def oracle_engine(model: str) -> Served:
    return serve(**EXACT, model=model, prefix_cache=False)


@cache
def cold(model: str, ids: tuple[int, ...], tokens: int) -> Trace:
    """The same request with every cache off."""
    served = oracle_engine(model)
    served.outputs.clear()
    served.submit("cold", np.array(ids, np.int32), tokens)
    served.run()
    return served.trace("cold")


@pytest.mark.parametrize("window_kv", ["auto", "pages"])
def test_edited_sessions_are_bit_equal_to_cold_runs(model, window_kv):
    rng, served = random.Random(5), serve(**EXACT, model=model, window_kv=window_kv)
    history, reused = sessions.opening(rng, 24), 0
    for turn in range(4):
        ids = say(served, f"t{turn}", history, tokens=4)
        served.run()
        assert served.trace(f"t{turn}") == cold(model, ids, 4), f"turn {turn}"
        reused += served.outputs[f"t{turn}"][-1].cached_tokens
        history = sessions.edited((*history, *sessions.step(rng, turn, 8)), rng)
        served.engine.scheduler.check()
        served.engine.scheduler.reuse.cache.check()
    restores = served.engine.scheduler.reuse.snapshot().get("restores", 0)
    assert reused > 0 and (restores > 0) == (window_kv == "auto")
    served.close()


@pytest.mark.parametrize("backend", ["cpu", "fused", "offload", "hybrid"])
def test_a_backend_changes_no_bit(model, backend):
    where = EXACT if backend in ("cpu", "fused") else SIM
    served = serve(**{**where, "moe_backend": backend}, model=model)
    ids = text_ids(served.built, 3, 60)
    served.submit("a", ids, 6)
    served.run()
    served.close()
    assert served.trace("a") == cold(model, tuple(int(i) for i in ids), 6)


def test_the_plan_says_where_windows_lie_and_refuses_what_cannot_be(model, tmp_path):
    served = serve(**EXACT, model=model)
    assert any("windows of 24 tokens are a state" in line for line in served.built.plan.lines())
    served.close()
    wide = windowed.write(tmp_path / "wide", {"sliding_window": 2000})
    served = serve(**EXACT, model=wide)
    assert any("2000 tokens lie in the KV pages" in line for line in served.built.plan.lines())
    served.close()
    lonely = windowed.write(tmp_path / "lonely", {"layer_types": ["sliding_attention"] * 4})
    served = serve(**EXACT, model=lonely)
    assert not served.engine.scheduler.reuse.cache.wants_states()
    served.close()
    with pytest.raises(ConfigError) as caught:
        serve(**EXACT, model=lonely, window_kv="states")
    assert caught.value.param == "window_kv" and caught.value.code == "invalid_option"


def test_a_turn_of_harmony_goes_through_the_engine_and_the_next_one_resumes_behind_it(tmp_path):
    served = serve(**EXACT, model=windowed.write_harmony(tmp_path))
    codec, tool = served.built.codec, Tool("now")
    turns = (Message("system", "Be brief, and " * 12), Message("user", "What time is it?"))

    def answer(name: str, said: str) -> tuple[Answer, int]:
        asked = Conversation(turns, tools=(tool,))
        prompt = codec.encode(asked)
        ids = tuple(int(i) for i in codec.tokenizer.encode(said))
        params = SamplingParams(temperature=0.0, forced_ids=ids, stop_ids=prompt.stop_ids)
        anchors = (prompt.anchor_positions, prompt.anchor_ids)
        served.engine.submit(Submit(name, prompt.ids, params, *anchors))
        served.run()
        reader = codec.reader(asked, prompt)
        events = [event for output in served.outputs[name] for event in reader.feed(output)]
        return fold(events), len(prompt.ids)

    thought = "<|channel|>analysis<|message|>I look.<|end|>"
    first, size = answer("first", thought + harmony.write_call("now", {}))
    assert (first.reasoning, [call.name for call in first.tool_calls]) == ("I look.", ["now"])
    assert first.finish.reason == "tool_calls" and first.finish.usage.cached_tokens == 0
    call = ToolCall(first.tool_calls[0].id, "now", first.tool_calls[0].arguments)
    turns += (Message("assistant", "", "I look.", (call,)), Message("tool", "noon", tool_call_id=call.id))
    second, _ = answer("second", "<|channel|>final<|message|>Noon.<|return|>")
    assert (second.content, second.finish.reason) == ("Noon.", "stop")
    thought_tokens = len(codec.tokenizer.encode(thought))
    assert second.finish.usage.cached_tokens >= size + thought_tokens, "resumes behind the thought it kept"
    served.close()
