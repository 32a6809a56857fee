"""Servers as processes of their own: started by a command line, waited for, stopped.

Owns ports, logs and patience. Ready means that a completion came to its end, whatever else the server answers
before. Knows no server's options but `{port}` in its command.
"""

from __future__ import annotations

import contextlib
import http.client
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from freetoken.bench._client import Server
from freetoken.core.errors import ConfigError, DeviceError, FreeTokenError

PATIENCE_S = 300.0
_POLL_S = 0.2
_STOP_S = 15.0
_FALL_S = 1.0
"""Until a process is gone whose connections have broken."""


@contextmanager
def tidy() -> Iterator[None]:
    """While the block lasts, being told to end does what Ctrl-C does: what was started ends, too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are none of this thread's business
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: what follows must come to its end
        raise SystemExit(128 + number)

    known = [one for one in signal.Signals if one.name in ("SIGTERM", "SIGHUP")]
    numbers = [one for one in known if signal.getsignal(one) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def split_command(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ConfigError("The server's command is empty.", code="invalid_option")
    return words


@dataclass
class Started:
    """A server's process, which may still be loading."""

    name: str
    process: subprocess.Popen[bytes]
    server: Server
    log: Path
    port: int

    def ready(self, patience_s: float = PATIENCE_S) -> Server:
        """Wait until it answers; DeviceError with the end of its log if it ends before."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            self.check()
            with contextlib.suppress(
                OSError, http.client.HTTPException, ValueError, LookupError, FreeTokenError
            ):
                self.server.find_model()
                self.server.try_out()
                return self.server
            time.sleep(_POLL_S)
        raise DeviceError(f"{self.name} did not answer within {patience_s:g} s.", code="server_failed")

    def check(self, patience_s: float = 0.0) -> None:
        """DeviceError with the end of its log if it has ended, or does so within the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(patience_s)
            tail = self.log.read_text("utf-8", "replace").strip().splitlines()[-5:]
            raise DeviceError(
                f"{self.name} ended with code {code}: {' / '.join(tail)}",
                code="server_failed",
                hint="Run its command alone to see more.",
            )


@contextmanager
def started(command: Sequence[str], name: str) -> Iterator[Started]:
    """Start a server that runs while the block lasts; `{port}` in its command becomes a free port."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    with tidy(), tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            try:
                process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            except OSError as error:
                raise ConfigError(f"{name} can't be started: {error}.", code="server_failed") from error
        one = Started(name, process, Server(f"http://127.0.0.1:{port}"), log, port)
        try:
            yield one
        except (OSError, http.client.HTTPException):
            one.check(_FALL_S)  # who is gone answers nobody
            raise
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
