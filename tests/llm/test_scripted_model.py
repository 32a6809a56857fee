"""`--model script:FILE`: the demo model runs for real and says what the script says."""

from __future__ import annotations

import json

import pytest

from freetoken.chat.conversation import Conversation, Message, Tool
from freetoken.chat.events import fold
from freetoken.core.errors import ConfigError, RequestError
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.llm import LLM, build_llm

LINES = [
    {"when": {"tool": "bash", "answers": 0}, "think": "Look.", "say": "Ünï ✓", "calls": [{"name": "bash"}]},
    {"when": {"tools": False}, "say": "Done. " * 20},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    file = tmp_path_factory.mktemp("script") / "agent.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    llm = build_llm(Options(device="cpu", model=f"script:{file}", moe_backend="cpu"))
    yield llm
    llm.close()


def ask(*tools: str) -> Conversation:
    return Conversation((Message("user", "Go."),), tuple(map(Tool, tools)))


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_the_script_is_said_through_the_real_engine(llm, thinking):
    params = GenerateParams(thinking=thinking, logprobs=0)
    answer = fold(llm.submit_chat(ask("bash"), params, f"r-{thinking}"))
    assert (answer.reasoning, answer.content) == ("Look.", "Ünï ✓")
    assert [call.name for call in answer.tool_calls] == ["bash"]
    assert answer.finish.reason == "tool_calls"
    assert len(answer.logprobs) == answer.finish.usage.completion_tokens
    assert min(info.logprob for info in answer.logprobs) < -1.0, "the model's own log probs, not the script's"


def test_limits_cut_a_script_as_they_cut_any_answer(llm):
    answer = fold(llm.submit_chat(ask(), GenerateParams(thinking="off", max_tokens=9), "cut"))
    assert answer.finish.reason == "length" and answer.finish.usage.completion_tokens == 9
    stopped = fold(llm.submit_chat(ask(), GenerateParams(thinking="off", stop=["ne. Do"]), "stop"))
    assert (stopped.content, stopped.finish.stop) == ("Do", "ne. Do")


def test_a_conversation_that_the_script_does_not_know_is_refused(llm):
    with pytest.raises(RequestError) as caught:
        llm.submit_chat(ask("other"), GenerateParams(), "lost")
    assert caught.value.code == "script_has_no_line"
    assert llm.model_name == "script-agent"


def test_a_missing_script_fails_the_load_by_name():
    llm = LLM(Options(model="script:/no/such/file.jsonl"))
    with pytest.raises(ConfigError):
        llm.load()
    assert llm.status().error.code == "unreadable_file"
