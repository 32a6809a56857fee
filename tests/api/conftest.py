"""Real servers on free loopback ports, with clients for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from scripted_llm import Script, ScriptedLLM

from freetoken.api.server import serving
from freetoken.core.generate import Status
from freetoken.core.options import Options


@dataclass
class Served:
    base: str
    llm: ScriptedLLM
    http: httpx.Client
    client: openai.OpenAI
    stack: ExitStack

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


class Pool:
    """Servers kept for the whole run, one for each set of options: starting and stopping takes time."""

    def __init__(self) -> None:
        self._stacks: list[ExitStack] = []
        self._servers: dict[tuple[Any, ...], Served] = {}

    def get(
        self,
        script: Script | None = None,
        *,
        status: Status | None = None,
        keep_alive_s: float = 15.0,
        fresh: bool = False,
        **options: Any,
    ) -> Served:
        """`fresh`: a server of its own, whose metrics begin at zero."""
        key = (keep_alive_s, *sorted(options.items()))
        served = self._servers.get(key)
        if served is None or fresh:
            served = self._servers[key] = self._start(keep_alive_s, options)
        served.llm.reset(script, status)
        return served

    def _start(self, keep_alive_s: float, options: dict[str, Any]) -> Served:
        stack = ExitStack()
        self._stacks.append(stack)
        llm, enter = ScriptedLLM(), stack.enter_context
        wishes = Options(port=0, drain_seconds=1.0, **options)
        base = enter(serving(llm, wishes, keep_alive_s=keep_alive_s))
        http = enter(httpx.Client(base_url=base, timeout=10))
        key = options.get("api_key") or "none"
        client = enter(openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=10))
        return Served(base, llm, http, client, stack)

    def close(self) -> None:
        """Stop all at once: each takes a moment to notice."""
        with ThreadPoolExecutor(32) as workers:
            list(workers.map(ExitStack.close, self._stacks))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def serve(pool: Pool) -> Callable[..., Served]:
    """`serve(script, **options)` gives a server that plays `script`, with clients for it."""
    return pool.get
