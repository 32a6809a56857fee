"""The commands with the real engine and the embedded model."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.cli import main as cli

READY_S = 60.0


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ft(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "freetoken", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    process = ft("serve", "--port", str(port))
    end = time.monotonic() + READY_S
    try:
        while time.monotonic() < end and process.poll() is None:
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        yield process, port
    finally:
        process.kill()
        process.communicate()


def test_generate_prints_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--prompt", "Who are you?", "--temperature", "0", "--max-tokens", "40", "--json"]
    assert cli.main(argv) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["content"] and body["finish_reason"] in ("stop", "length")
    assert 0 < body["tokens"] <= 40


def test_a_server_answers_a_chat_and_says_what_it_decided(
    serving: tuple[subprocess.Popen[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    process, port = serving
    assert process.poll() is None
    assert cli.main(["chat", "--port", str(port), "--prompt", "Who are you?", "--temperature", "0"]) == 0
    assert "tokens · " in capsys.readouterr().out
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert out == ""
    for word in ("machine", "model", "plan", "limit", "helps", "loaded", f"http://127.0.0.1:{port}"):
        assert word in err
    assert "NVIDIA GPU" in err.partition("helps")[2].splitlines()[0], "what would help is something there is"
    assert "Who are you?" not in err, "a log never holds a prompt"
    assert "POST /v1/chat/completions 200" in err


def test_serving_a_missing_checkpoint_ends_with_its_error_and_code(tmp_path: Path) -> None:
    process = ft("serve", str(tmp_path / "nothing"), "--port", str(free_port()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert "error [unknown_path]: " in err and "Traceback" not in err


def test_a_taken_port_is_told_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = ft("serve", "--port", str(server.getsockname()[1]))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error [port_taken]: " in err and "--port" in err and "reading" not in err


@pytest.mark.soak
def test_the_demo_keeps_all_its_claims(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["demo", "--ci"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "simulated" in said and "FAILED" not in said
