"""The server as a process: its address, its signals, its exit codes, and what it leaves behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from freetoken.api import ports
from freetoken.core.errors import ConfigError

SCRIPT = Path(__file__).parent / "serve_script.py"
HI = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Process:
    def __init__(self, popen: subprocess.Popen[str], url: str) -> None:
        self.popen, self.url = popen, url
        self.texts: list[str] = []

    def ask(self) -> threading.Thread:
        """Start a streaming request and return once its first text is here."""
        begun = threading.Event()

        def work() -> None:
            text = ""
            try:
                with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=HI, timeout=20) as reply:
                    for piece in reply.iter_text():
                        text += piece
                        if "begun" in text:
                            begun.set()
            except httpx.HTTPError:
                text += "BROKEN"
            self.texts.append(text)

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(10)
        return thread

    def end(self) -> tuple[int, str]:
        """Wait for the process; its exit code and last line."""
        out, err = self.popen.communicate(timeout=20)
        assert "Traceback" not in err, err
        return self.popen.returncode, out.strip().splitlines()[-1] if out.strip() else ""


@contextmanager
def process(answer_s: float, drain_s: float = 10.0, port: int = 0) -> Iterator[Process]:
    command = [sys.executable, str(SCRIPT), str(answer_s), str(drain_s), str(port)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        yield Process(popen, popen.stdout.readline().strip())
    finally:
        popen.kill()
        popen.communicate()


def test_sigterm_lets_a_running_answer_finish_and_nothing_is_called_meanwhile():
    with process(answer_s=1.0) as server:
        thread = server.ask()
        port = int(server.url.rsplit(":", 1)[1])
        connections = psutil.Process(server.popen.pid).net_connections()
        assert {c.laddr.port for c in connections} == {port}
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        thread.join()
        assert "done" in server.texts[0] and "[DONE]" in server.texts[0]
        assert server.end() == (0, "live=0 threads=[] outbound=[]")


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of Windows send no such signal")
def test_a_terminal_that_closes_stops_the_server_in_order():
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("ignored here, and by the child, too")
    with process(answer_s=1.0) as server:
        thread = server.ask()
        for _ in range(2):
            server.popen.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        thread.join()
        assert "done" in server.texts[0] and "[DONE]" in server.texts[0]
        assert server.end() == (0, "live=0 threads=[] outbound=[]")


def test_answers_beyond_the_drain_time_are_cut_and_the_exit_code_says_so():
    with process(answer_s=30.0, drain_s=0.3) as server:
        thread = server.ask()
        server.popen.send_signal(signal.SIGTERM)
        thread.join()
        assert '"code":"aborted"' in server.texts[0]
        assert server.end() == (6, "live=0 threads=[] outbound=[]")


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_the_server_at_once(sig, code):
    with process(answer_s=60.0, drain_s=60.0) as server:
        thread = server.ask()
        server.popen.send_signal(sig)
        time.sleep(0.3)
        assert server.popen.poll() is None
        began = time.monotonic()
        server.popen.send_signal(sig)
        assert server.end() == (code, "live=0 threads=[] outbound=[]")
        assert time.monotonic() - began < 20
        thread.join()


def test_an_idle_server_stops_at_once_on_ctrl_c():
    with process(answer_s=0.0, drain_s=60.0) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        began = time.monotonic()
        server.popen.send_signal(signal.SIGINT)
        assert server.end() == (0, "live=0 threads=[] outbound=[]")
        assert time.monotonic() - began < 20


def test_the_port_is_free_again_after_the_end():
    with process(answer_s=0.0) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=HI)
        server.popen.send_signal(signal.SIGTERM)
        server.end()
        port = int(server.url.rsplit(":", 1)[1])
        ports.bind("127.0.0.1", port).close()


def test_a_taken_port_names_its_holder_and_the_next_free_one():
    with ports.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            ports.bind("127.0.0.1", port)
    error = caught.value
    assert (error.code, error.param, error.exit_code) == ("port_taken", "port", 2)
    assert f"Port {port} is taken by this process (pid {os.getpid()})" in error.message
    free = int("".join(c for c in error.hint.split(",")[0] if c.isdigit()))
    assert port < free < port + ports.TRIES


def test_a_port_held_by_another_process_is_told_with_its_name():
    with process(answer_s=0.0) as server:
        port = int(server.url.rsplit(":", 1)[1])
        assert ports.holder(port).endswith(f"(pid {server.popen.pid})")


def test_wrong_addresses_are_told_apart(monkeypatch):
    with pytest.raises(ConfigError) as foreign:
        ports.bind("192.0.2.1", 0)
    assert foreign.value.code == "invalid_host"
    with pytest.raises(ConfigError) as huge:
        ports.bind("127.0.0.1", 70_000)
    assert huge.value.code == "invalid_port"

    def forbid(*_: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(socket.socket, "bind", forbid)
    with pytest.raises(ConfigError) as low:
        ports.bind("127.0.0.1", 80)
    assert low.value.code == "port_refused"


def test_addresses_read_as_urls():
    with ports.bind("0.0.0.0", 0) as sock:
        assert ports.url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            sock = ports.bind("::1", 0)
        except ConfigError:
            return
        with sock:
            assert ports.url(sock).startswith("http://[::1]:")


def test_small_pieces_are_sent_at_once_on_any_event_loop():
    """asyncio switches the network's own collecting off only for sockets that say they are TCP."""
    with ports.bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP
