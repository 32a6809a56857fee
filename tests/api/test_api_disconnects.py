"""A client that leaves, at whatever moment, leaves nothing running behind."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import pytest
from scripted_llm import HANG, say, think_then_call

from freetoken.chat.events import TextDelta

ROUNDS = [25, pytest.param(200, marks=pytest.mark.soak)]
PHASES = ["headers", "body", "submit", "waiting", "streaming"]


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}


def open_request(
    base: str, *, stream: bool, part: str = "all", n: int = 1, path: str = "/v1/chat/completions"
) -> socket.socket:
    """Send a request, or only its headers or half its body, over a bare socket."""
    host, port = base.removeprefix("http://").split(":")
    body = json.dumps({**BODIES[path], "stream": stream, "n": n}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(head if part == "headers" else head + (body[: len(body) // 2] if part == "body" else body))
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_leaving_at_each_phase_ends_the_generations(serve, phase, stream, rounds):
    served = serve(lambda _: [TextDelta("a"), HANG] if phase == "streaming" else [HANG], fresh=True)
    served.llm.submit_delay_s = 0.01 if phase == "submit" else 0.0
    sent = 0
    for round_ in range(rounds):
        n = 1 + round_ % 2
        sock = open_request(served.base, stream=stream, part=phase, n=n)
        sent += n
        if phase == "streaming" and stream:
            assert b"200 OK" in sock.recv(4096)
        elif phase in ("waiting", "streaming"):
            wait_for(lambda due=sent: len(served.llm.asked) == due)
        sock.close()
    text = wait_for_metric(served, "freetoken_requests_running 1.0")
    if phase in ("headers", "body"):
        assert not served.llm.asked
    elif phase != "submit":
        assert len(served.llm.asked) == sent
        assert f"freetoken_client_disconnects_total {float(rounds)}" in text
    wait_for(lambda: served.llm.num_cancelled == len(served.llm.asked))
    assert not served.llm.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_leaving_ends_the_generation_in_every_protocol(serve, path, stream):
    served = serve(lambda _: [TextDelta("a"), HANG], fresh=True)
    for round_ in range(10):
        sock = open_request(served.base, stream=stream, path=path)
        wait_for(lambda due=round_ + 1: len(served.llm.asked) == due)
        sock.close()
    wait_for(lambda: served.llm.num_cancelled == 10)
    assert not served.llm.live


def wait_for(condition):
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def wait_for_metric(served, line):
    """Poll /metrics, itself the one running request, until `line` is in it."""
    until = time.monotonic() + 5
    while True:
        text = served.http.get("/metrics").text
        if line in text or time.monotonic() > until:
            assert line in text
            return text


def test_a_late_disconnect_is_no_abort(serve):
    served = serve()
    for _ in range(10):
        sock = open_request(served.base, stream=True)
        while b"[DONE]" not in sock.recv(65536):
            pass
        sock.close()
    assert served.llm.wait_until_idle()
    assert served.llm.num_cancelled == 0


def test_many_clients_of_whom_some_leave_get_whole_answers_or_none(serve):
    served = serve(lambda _: [0.005, TextDelta("a"), 0.005, *think_then_call()])
    outcomes: list[str] = []

    def one(seed: int) -> None:
        dice = random.Random(seed)
        sock = open_request(served.base, stream=dice.random() < 0.7, n=1 + seed % 3)
        got = b""
        leaves_after_s = dice.choice([0.0, 0.004, 0.012, 9.0])
        until = time.monotonic() + leaves_after_s
        while time.monotonic() < until and b"[DONE]" not in got and b'"usage"' not in got:
            sock.settimeout(max(0.001, until - time.monotonic()))
            try:
                got += sock.recv(65536)
            except TimeoutError:
                break
        outcomes.append("whole" if b"[DONE]" in got or b'"usage"' in got else "left")
        assert leaves_after_s < 9 or outcomes[-1] == "whole"
        sock.close()

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("whole") >= 10 and outcomes.count("left") >= 10
    assert served.llm.wait_until_idle()
    wait_for_metric(served, "freetoken_requests_running 1.0")


def test_a_slow_reader_gets_the_whole_text_in_few_large_chunks(serve):
    words = [f"word{i} " for i in range(40_000)]
    served = serve(lambda _: say(*words))
    sock = open_request(served.base, stream=True)
    time.sleep(0.3)
    got = b""
    while b"[DONE]" not in got[-200:]:
        got += sock.recv(1 << 20)
    sock.close()
    frames = [
        line for line in got.decode().split("\r\n") for line in line.split("\n") if line.startswith("data: {")
    ]
    contents = [c["delta"].get("content", "") for f in frames for c in json.loads(f[6:])["choices"]]
    assert "".join(contents) == "".join(words)
    assert len(frames) < len(words) / 2
