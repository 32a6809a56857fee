"""What real agents sent, replayed: every request is served, and each turn extends the one before.

The recordings are whole sessions (edit a file, run its test) with other people's words replaced;
`tests/soak/record_agents.py` makes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic_grammar
import pytest
import responses_grammar
from scripted_llm import think_then_call

RECORDED = {
    p.stem: json.loads(p.read_text("utf-8")) for p in sorted(Path(__file__).parent.glob("recorded/*.json"))
}
GRAMMARS = {"/v1/messages": anthropic_grammar.check, "/v1/responses": responses_grammar.check}


def replay(served: Any, request: dict[str, Any]) -> str:
    served.llm.max_model_len = 65_536
    path = f"{request['path']}?{request['query']}"
    reply = served.http.post(path, content=json.dumps(request["body"]), headers=request["headers"])
    assert reply.status_code == 200, reply.text
    return reply.text


@pytest.mark.parametrize("agent", RECORDED)
def test_every_request_of_a_session_is_served_by_the_grammar_of_its_protocol(serve, agent):
    served = serve(lambda _: think_then_call())
    for request in RECORDED[agent]:
        text = replay(served, request)
        check = GRAMMARS.get(request["path"])
        if check is not None:
            check(text)
        else:
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"tool_calls"' in text


@pytest.mark.parametrize("agent", RECORDED)
def test_each_turn_extends_the_conversation_before_so_that_a_prefix_cache_can_work(serve, agent):
    served = serve()
    for request in RECORDED[agent]:
        replay(served, request)
    main = [asked.prompt for asked in served.llm.asked if asked.prompt.tools]
    assert len(main) == 4
    for before, after in zip(main, main[1:], strict=False):
        assert before.tools == after.tools
        assert after.messages[: len(before.messages)] == before.messages
        added = after.messages[len(before.messages) :]
        assert [turn.role for turn in added] == ["assistant", "tool"]
        assert added[0].tool_calls[0].id == added[1].tool_call_id


@pytest.mark.parametrize("agent", RECORDED)
def test_thoughts_come_back_with_their_call(serve, agent):
    served = serve()
    for request in RECORDED[agent]:
        replay(served, request)
    answered = [turn for turn in served.llm.asked[-1].prompt.messages if turn.role == "assistant"]
    assert answered[0].reasoning == "The sum is wrong."


def test_recordings_hold_nothing_personal():
    for name, requests in RECORDED.items():
        text = json.dumps(requests)
        assert not any(word in text for word in ("/home/", "/tmp/", "/Users/", "Bearer", "api_key")), name
        assert max(len(line) for request in requests for line in texts(request["body"])) < 300, name


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for child in children for text in texts(child)]
