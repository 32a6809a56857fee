"""A real server on a free loopback port for each test that asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from scripted_llm import Script, ScriptedLLM

from freetoken.api.server import serving
from freetoken.core.options import Options


@dataclass
class Served:
    base: str
    llm: ScriptedLLM
    http: httpx.Client
    client: openai.OpenAI

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(script, **options)` starts a server and returns clients for it."""
    with ExitStack() as stack:

        def start(
            script: Script | None = None,
            *,
            llm: ScriptedLLM | None = None,
            keep_alive_s: float = 15.0,
            **options: Any,
        ) -> Served:
            model = llm or ScriptedLLM(script)
            wishes = Options(port=0, drain_seconds=1.0, **options)
            base = stack.enter_context(serving(model, wishes, keep_alive_s=keep_alive_s))
            http = stack.enter_context(httpx.Client(base_url=base, timeout=10))
            key = options.get("api_key") or "none"
            client = stack.enter_context(
                openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=10)
            )
            return Served(base, model, http, client)

        yield start
