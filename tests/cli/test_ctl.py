"""`ft ctl` shows what a running server says of its requests and memory, and steers it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from freetoken.api.server import serving
from freetoken.cli import main
from freetoken.core.options import Options
from freetoken.core.units import MIB
from freetoken.llm import build_llm

RULES = "You are a careful assistant. " * 12


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    options = Options(device="cpu", port=0)
    llm = build_llm(options)
    try:
        with serving(llm, options) as base:
            yield base
    finally:
        llm.close()


def ctl(base: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.main(["ctl", *words, "--port", str(urlsplit(base).port)]) == 0
    return capsys.readouterr().out


def ask(base: str, *turns: str) -> httpx.Response:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": RULES}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, "enable_thinking": False}
    reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    return reply


def test_requests_tell_what_was_reused_and_why_not_more(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(place, "What is a boat? " * 10, "A thing that swims.", "And a ship? " * 12)
    ask(place, "What is a boat? " * 10, "A thing that sinks.", "And a ship? " * 12)
    until = time.monotonic() + 10
    while (listed := ctl(place, capsys, "requests")).count("\n") < 4 and time.monotonic() < until:
        time.sleep(0.02)  # a receipt is written once the last byte is out
    assert "the text was changed: turn 2 (assistant)" in listed, listed
    assert "nothing like it was asked before" in listed
    rows = json.loads(ctl(place, capsys, "requests", "--json"))["data"]
    prefix = rows[0]["prefix"][0]
    assert prefix["cause"] == "text_changed" and prefix["reused"] > 60
    assert prefix["reused"] + prefix["recomputed"] == rows[0]["tokens"]["prompt"]
    assert prefix["reused"] <= prefix["first_difference"]
    whole = ctl(place, capsys, "requests", rows[0]["id"])
    assert "reused" in whole and "seconds" in whole


def test_cache_shows_memory_and_changes_it(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads(ctl(place, capsys, "cache", "--json"))["memory"]
    half = before["budget_bytes"] * 3 // 4
    after = json.loads(ctl(place, capsys, "cache", "--memory", str(half), "--json"))["memory"]
    assert after["budget_bytes"] == half and after["kv_pages"] < before["kv_pages"]
    ask(place, "Still there?")
    assert "kv_pages" in ctl(place, capsys, "cache", "--memory", str(before["budget_bytes"]))
    assert json.loads(ctl(place, capsys, "cache", "--json"))["memory"] == before | {
        "kv_pages_used": json.loads(ctl(place, capsys, "cache", "--json"))["memory"]["kv_pages_used"]
    }


def test_memory_changes_while_an_answer_streams_and_changes_no_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU that is simulated: slots and pages are traded under a running request, over HTTP."""
    options = Options(
        device="sim", machine="4060-laptop", moe_backend="offload", gpu_memory=110 * MIB, port=0,
        max_model_len=1024,
    )  # fmt: skip
    llm = build_llm(options)
    body = {"prompt": RULES, "max_tokens": 48, "temperature": 0, "ignore_eos": True}

    def stream(base: str, budgets: list[int]) -> str:
        """The streamed text; between its pieces the memory budget changes, by both ways there are."""
        text, wishes = "", iter(budgets)
        with httpx.stream(
            "POST", f"{base}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as reply:
            for number, line in enumerate(reply.iter_lines()):
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if number % 10 == 9 and (wish := next(wishes, None)):
                    memory = json.loads(ctl(base, capsys, "cache", "--memory", str(wish), "--json"))["memory"]
                    assert memory["budget_bytes"] == wish and memory["kv_pages_used"] > 0
                    posted = httpx.post(f"{base}/v1/cache/resize", json={"memory": wish + MIB}, timeout=60)
                    assert posted.json()["memory"]["budget_bytes"] == wish + MIB
        assert next(wishes, None) is None, "the answer ended before the memory had changed"
        return text

    try:
        with serving(llm, options) as base:
            untouched = stream(base, [])
            assert stream(base, [75 * MIB, 100 * MIB, 72 * MIB]) == untouched != ""
            assert httpx.get(f"{base}/v1/stats").json()["engine"]["resizes"] == 6
    finally:
        llm.close()


def test_a_wish_that_does_not_fit_and_a_server_that_is_not_there_are_told(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(urlsplit(place).port)
    assert main.main(["ctl", "cache", "--memory", "1MiB", "--port", port]) == 1
    assert "does_not_fit" in capsys.readouterr().err
    assert main.main(["ctl", "cache", "--memory", "", "--port", port]) == 1, "no wish at all is another thing"
    assert "out_of_range" in capsys.readouterr().err
    assert main.main(["ctl", "requests", "--limit", "0", "--port", port]) == 2
    assert "--limit" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main.main(["ctl", "requests", "--port", str(free.getsockname()[1])]) == 2
    assert "no_server" in capsys.readouterr().err
    assert main.main(["ctl"]) == 2
    assert main.main(["ctl", "requestz"]) == 2
    assert "requests" in capsys.readouterr().err
