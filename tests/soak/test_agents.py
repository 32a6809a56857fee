"""Claude Code, Codex and OpenCode each edit a file and run its test, served by `ft serve`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from freetoken.api.ports import bind
from tests.soak import agent_sessions
from tests.soak.agent_sessions import DONE, SESSIONS, Session

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]


@contextmanager
def served(script: Path) -> Iterator[int]:
    """A server process that plays a script; gives its port."""
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "freetoken", "serve", "--model", f"script:{script}", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and server.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


@pytest.mark.parametrize("session", SESSIONS, ids=lambda s: s.name)
def test_an_agent_edits_a_file_and_runs_its_test(session: Session, tmp_path: Path) -> None:
    programs, reason = agent_sessions.find(session)
    if programs is None:
        pytest.skip(reason)
    folder = agent_sessions.workspace(tmp_path / "project")
    script = tmp_path / "script.jsonl"
    script.write_text(session.script(folder), encoding="utf-8")
    with served(script) as port:
        said = agent_sessions.launch(session, programs, folder, port, timeout_s=1800)
    assert DONE in said, said[-2000:]
    assert "return a + b" in (folder / "calc.py").read_text("utf-8")
