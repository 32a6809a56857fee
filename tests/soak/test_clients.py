"""64 streaming clients, 1,000 requests, random departures: nothing leaks, every stream is well formed."""

import asyncio
import json
import random
import time

import httpx
import psutil
import pytest

from freetoken.api.server import serving
from freetoken.core.options import Options
from freetoken.llm import LLM, build_llm

CLIENTS, REQUESTS = 64, 1000


def body(number: int) -> dict:
    rng = random.Random(number % 20)
    words = " ".join(
        rng.choice(["tell", "me", "a", "story", "about", "numbers"]) for _ in range(rng.randrange(2, 40))
    )
    return {
        "model": "demo", "stream": True, "temperature": 0, "max_tokens": rng.randrange(3, 24),
        "messages": [{"role": "user", "content": words}], "stream_options": {"include_usage": True},
    }  # fmt: skip


async def answer(http: httpx.AsyncClient, number: int, leaves: bool = False) -> str | None:
    """One stream, checked frame by frame; None if the client left it."""
    text, done, usage = "", False, None
    async with http.stream("POST", "/v1/chat/completions", json=body(number)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if leaves and random.random() < 0.3:
                return None
            if not line.startswith("data: "):
                assert line == "" or line.startswith(":"), line
                continue
            assert not done, "a frame after the end"
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or delta.get("reasoning_content") or ""
    assert done and usage, "a stream without an end"
    return text


async def client(http: httpx.AsyncClient, numbers: list[int], answers: dict[int, str]) -> None:
    """Take numbers until none is left; leave one answer in five early."""
    while numbers:
        number = numbers.pop()
        text = await answer(http, number, leaves=random.Random(number).random() < 0.2)
        if text is not None:
            answers[number] = text


async def storm(url: str, clients: int, numbers: list[int]) -> dict[int, str]:
    answers: dict[int, str] = {}
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as http:
        await asyncio.gather(*(client(http, numbers, answers) for _ in range(clients)))
    return answers


async def alone(url: str) -> dict[int, str | None]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        return {number: await answer(http, number) for number in range(20)}


def at_rest(llm: LLM) -> bool:
    s = llm.built.engine.scheduler
    return not (s.running or s.waiting) and s.holds_nothing


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_storm_of_clients_leaves_nothing_behind():
    llm = build_llm(Options(device="cpu", moe_backend="fused", exact=True, port=0))
    threads = psutil.Process().num_threads()
    with serving(llm, llm.options) as url:
        expected = asyncio.run(alone(url))
        answers = asyncio.run(storm(url, CLIENTS, list(range(REQUESTS))))
        for _ in range(200):
            if at_rest(llm):
                break
            time.sleep(0.05)
        assert at_rest(llm)
        llm.built.engine.scheduler.check()
    assert len(answers) > REQUESTS * 0.6
    assert all(answers[n] == expected[n % 20] for n in answers), "exact mode: company changes no answer"
    llm.close()
    assert psutil.Process().num_threads() <= threads + 2
