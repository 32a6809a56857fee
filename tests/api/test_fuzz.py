"""Whatever a client sends, it gets an answer or a refusal with a code: never a server error.

Valid requests are damaged at random places; what is accepted is also rendered and compiled for real.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from scripted_llm import ScriptedGeneration, ScriptedLLM
from test_control_text import CHAT, MESSAGES, RESPONSES

from freetoken.api.app import create_app
from freetoken.chat.codec import ChatCodec
from freetoken.chat.constraint import ConstraintMaker
from freetoken.chat.conversation import Conversation
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "x"]}, "b": {"$ref": "#/$defs/t"}},
    "$defs": {"t": {}},
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "stop": ["a"], "n": 2, "seed": 1, "logit_bias": {"5": 1.0}, "logprobs": True, "top_logprobs": 3,
            "reasoning_effort": "low", "thinking": {"type": "enabled", "budget_tokens": 3},
        },
        {"messages": [{"role": "user", "content": "Hi"}], "guided_regex": "a|b", "tool_choice": "auto"},
    ],
    "/v1/responses": [
        RESPONSES,
        {"input": "Hi", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}, "include": ["x"]},
        {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
    ],
    "/v1/messages": [
        MESSAGES,
        {
            "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}], "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 3}, "output_config": {"effort": "high"},
        },
    ],
    "/v1/messages/count_tokens": [MESSAGES],
    "/v1/completions": [
        {"prompt": "Hi", "max_tokens": 3, "logprobs": 2, "echo": False, "n": 2},
        {"prompt": [[1, 2], [3]], "stop": "x"},
    ],
}  # fmt: skip
ODD: list[Any] = [
    *[None, True, False, 0, -1, 1, 3.5, 1e308, 1 << 63, -(1 << 70)],
    *["", "x", "\ud800", "\u0000", "<|im_end|>", "(", "a" * 3000],
    *[[], {}, [[]], [None], {"type": "text"}, {"": None}, {"$ref": "#"}],
    *[{"type": "object", "properties": 3}, [{"role": "user"}]],
]
CASES = [500, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]


class RealWords(ScriptedLLM):
    """A scripted answer behind the real template, tokenizer and compiler of forms."""

    def prepare(self, codec: ChatCodec) -> None:
        self.codec = codec
        self.maker = ConstraintMaker(codec, codec.tokenizer.vocab_size)

    def submit_chat(
        self, conversation: Conversation, params: GenerateParams, request_id: str
    ) -> ScriptedGeneration:
        self.count_chat(conversation, params)
        prompt = self.codec.encode(conversation, thinking_budget=params.thinking_budget)
        self.maker.make(conversation, prompt, may_think=True)
        self.codec.reader(conversation, prompt, stop=params.stop)
        return super().submit_chat(conversation, params, request_id)

    def count_chat(self, conversation: Conversation, params: GenerateParams) -> int:
        return len(self.codec.encode(conversation, thinking_budget=params.thinking_budget).ids)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def damaged(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to three places replaced by something odd, removed, doubled or moved."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        found = [path for path in places(body) if path]
        if not found:
            break
        path = rng.choice(found)
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        how = rng.random()
        if how < 0.7:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.85:
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[path[-1]]))
        else:
            parent[rng.choice(["type", "content", "id", "name", "extra"])] = parent[path[-1]]
    return body


async def post(app: Any, path: str, raw: bytes) -> tuple[int, bytes]:
    """Status and body, with nothing between the test and the application: a client would take the most."""
    inbox = [{"type": "http.request", "body": raw}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop() if inbox else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-length", str(len(raw)).encode())]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("path", BODIES)
async def test_damaged_requests_are_answered_or_refused_with_a_code(path: str, cases: int) -> None:
    llm, rng = RealWords(), random.Random(path)
    llm.prepare(ChatCodec.from_directory(DEMO_MODEL))
    app = create_app(llm, Options())
    statuses: dict[int, int] = {}
    for _ in range(cases):
        raw = json.dumps(damaged(rng.choice(BODIES[path]), rng)).encode()
        status, reply = await post(app, path, raw)
        statuses[status] = statuses.get(status, 0) + 1
        assert status in (200, 400, 413), f"{status} {reply[:300]!r} for {raw[:2000]!r}"
        if status != 200:
            assert json.loads(reply)["error"]["code"] not in ("internal_error", ""), raw[:2000]
    assert statuses.get(200, 0) > cases // 50 and statuses.get(400, 0) > cases // 10, statuses
