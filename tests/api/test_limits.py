"""Several keys, limits a caller meets, and clients that mean no good."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from scripted_llm import ScriptedLLM, say

from freetoken.api import body, server
from freetoken.api.app import create_app
from freetoken.api.auth import read_keys
from freetoken.core.errors import ConfigError
from freetoken.core.options import Options

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def connect(base: str) -> socket.socket:
    host, port = base.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def rest(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    got = b""
    while piece := sock.recv(65536):
        got += piece
    return got


def test_keys_come_from_the_option_and_from_a_file(serve, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# people\nanna-1\n\n  ben-2  \nanna-1\n", encoding="utf-8")
    assert read_keys(Options(api_key="one, two", api_key_file=str(file))) == ("one", "two", "anna-1", "ben-2")
    served = serve(api_key="one,two", api_key_file=str(file))
    for key in ("one", "two", "anna-1", "ben-2"):
        assert served.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    for key in ("", "three", "one,two", "# people"):
        assert served.http.get("/v1/models", headers={"x-api-key": key}).status_code == 401


def test_a_key_file_that_is_not_there_stops_the_start():
    with pytest.raises(ConfigError) as caught:
        create_app(ScriptedLLM(), Options(api_key_file="/no/such/file"))
    assert caught.value.code == "unreadable_file"


def test_a_key_may_run_so_many_requests_at_once_and_others_are_not_affected(serve):
    served = serve(lambda _: [0.5, *say("done")], api_key="a,b", max_requests_per_key=2)
    codes: list[int] = []

    def ask(key: str) -> None:
        reply = httpx.post(
            f"{served.base}/v1/chat/completions", json=HI, headers={"x-api-key": key}, timeout=10
        )
        codes.append(reply.status_code)

    running = [threading.Thread(target=ask, args=("a",)) for _ in range(2)]
    for thread in running:
        thread.start()
    until = time.monotonic() + 5
    while len(served.llm.asked) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    refused = served.http.post("/v1/chat/completions", json=HI, headers={"x-api-key": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"]
    ask("b")
    for thread in running:
        thread.join()
    ask("a")
    assert codes == [200] * 4


@pytest.mark.parametrize("path", ["/v1/stats", "/metrics"])
async def test_figures_stay_on_this_machine_unless_callers_have_keys(path):
    async def ask(options: Options, address: str, headers: dict[str, str] | None = None) -> int:
        transport = httpx.ASGITransport(create_app(ScriptedLLM(), options), client=(address, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://box.lan") as client:
            return (await client.get(path, headers=headers)).status_code

    public = Options(host="0.0.0.0")
    assert await ask(public, "127.0.0.1") == 200
    assert await ask(public, "192.168.1.7") == 403
    keyed = Options(host="0.0.0.0", api_key="k")
    assert await ask(keyed, "192.168.1.7") == 401
    assert await ask(keyed, "192.168.1.7", {"x-api-key": "k"}) == 200


def test_a_request_head_that_never_ends_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    served = serve()
    with connect(served.base) as silent, connect(served.base) as slow:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ")
        start = time.monotonic()
        assert rest(silent) == b"" and rest(slow) == b""
        assert time.monotonic() - start < 5
    assert served.chat().status_code == 200


def test_a_request_head_without_bounds_is_dropped(serve):
    served = serve()
    with connect(served.base) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ")
        with pytest.raises(OSError):
            for _ in range(200):
                sock.sendall(b"a" * 4096)
                time.sleep(0.002)
    assert served.chat().status_code == 200


def test_a_body_that_does_not_come_is_refused(serve, monkeypatch):
    monkeypatch.setattr(body, "MAX_SECONDS", 0.2)
    served = serve()
    with connect(served.base) as sock:
        sock.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{")
        got = sock.recv(65536)
    assert b" 408 " in got and b'"request_timeout"' in got and b'"type":"error"' in got
    assert not served.llm.asked


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(serve):
    served = serve()
    with connect(served.base) as sock:
        size = str(body.MAX_BYTES + 1).encode()
        head = b"POST /v1/messages HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: " + size
        sock.sendall(head + b"\r\n\r\n{")
        got = sock.recv(65536)
    assert b" 413 " in got and b'"request_too_large"' in got
    assert not served.llm.asked


def test_a_client_may_think_between_two_requests_of_one_connection(serve, monkeypatch):
    served = serve()
    with httpx.Client(base_url=served.base) as client:
        assert client.post("/v1/chat/completions", json=HI).status_code == 200
        monkeypatch.setattr(server, "HEAD_S", 0.1)
        time.sleep(0.3)
        assert client.post("/v1/chat/completions", json=HI).status_code == 200
