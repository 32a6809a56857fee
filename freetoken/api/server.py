"""Running the application: uvicorn on a socket of ours, stopped in an orderly way, with exit codes.

    0    asked to stop (SIGTERM or Ctrl-C); every running request was finished
    6    asked to stop; `drain_seconds` passed and running requests were aborted
    130  a second Ctrl-C (143: a second SIGTERM) ended the server at once
A stop closes the listener first, then lets running requests finish while the model takes no new ones.
Knows uvicorn, which no other file does. Opens no connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from freetoken.api.app import create_app
from freetoken.api.face import LanguageModel
from freetoken.api.ports import bind, url
from freetoken.api.sse import KEEP_ALIVE_S
from freetoken.core.errors import DeviceError
from freetoken.core.log import logger
from freetoken.core.options import Options

EXIT_DRAINED = 0
EXIT_CUT = 6
SWITCH_INTERVAL_S = 1e-4
HEAD_S = 20.0
"""Longer than any client takes, short enough that idle sockets don't pile up."""
MAX_HEAD_BYTES = 64 << 10
_SETTLE_S = 5.0
_HANGUP = getattr(signal, "SIGHUP", None)
_log = logger("server")


def run(
    llm: LanguageModel,
    options: Options,
    *,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal ends it; return the exit code. Call it from the main thread.

    sock      a socket from `ports.bind`, taken before the model was loaded (default: bind now)
    on_ready  called with the base URL when connections are accepted
    Raises ConfigError if the address is taken.
    """
    sock = sock or bind(options.host, options.port)
    server = _Server(llm, options, on_ready)
    with _switch_interval(SWITCH_INTERVAL_S):
        server.run(sockets=[sock])
    return server.exit_code


@contextlib.contextmanager
def serving(
    llm: LanguageModel,
    options: Options,
    *,
    sock: socket.socket | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> Iterator[str]:
    """Serve from a thread while the block runs; gives the base URL. The model is left usable."""
    ready = threading.Event()
    sock = sock or bind(options.host, options.port)
    server = _Server(llm, options, lambda _: ready.set(), drains=False, keep_alive_s=keep_alive_s)
    base = url(sock)

    def work() -> None:
        try:
            server.run(sockets=[sock])
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="freetoken-http", daemon=True)
    thread.start()
    try:
        ready.wait()
        if not server.started:
            raise DeviceError("The HTTP server did not start.", hint="See the log.")
        yield base
    finally:
        server.should_exit = True
        thread.join()


class _Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, which drops a client whose request head is late or too large."""

    _patience: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        self._wait_for_head()
        super().data_received(data)
        if self._is_answering:
            self._head_bytes = 0
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._patience is None and not self._is_answering:
            self._patience = self.loop.call_later(HEAD_S, self.transport.close)


class _Server(uvicorn.Server):
    """uvicorn's server with our signals, our drain and our exit codes."""

    def __init__(
        self,
        llm: LanguageModel,
        options: Options,
        on_ready: Callable[[str], None] | None,
        *,
        drains: bool = True,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        drain_s = max(0.0, options.drain_seconds)
        config = uvicorn.Config(
            create_app(llm, options, keep_alive_s=keep_alive_s),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Impatient,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            server_header=False,
            timeout_graceful_shutdown=int(drain_s + _SETTLE_S),
        )
        super().__init__(config)
        self.exit_code = EXIT_DRAINED
        self._llm = llm
        self._drain_s = drain_s
        self._drains = drains
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready and sockets:
            self._on_ready(url(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self._stop(sockets))
        while not stopping.done():
            if self.force_exit:
                stopping.cancel()
            await asyncio.wait({stopping}, timeout=0.05)
        if not stopping.cancelled():
            stopping.result()

    async def _stop(self, sockets: list[socket.socket] | None) -> None:
        if self._drains:
            await asyncio.gather(super().shutdown(sockets), self._drain())
        else:
            await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Let the model finish; if its time ran out, the exit code says so."""
        began_s, were_running = time.monotonic(), bool(self.server_state.tasks)
        await self._llm.drain(self._drain_s)
        if were_running and time.monotonic() - began_s >= self._drain_s:
            _log.warning("stopped with requests unfinished after %g s", self._drain_s)
            self.exit_code = EXIT_CUT

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = [signal.SIGINT, signal.SIGTERM]
        if sys.platform == "win32":
            signals.append(signal.SIGBREAK)
        elif signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else somebody, like nohup, ignores it
            signals.append(signal.SIGHUP)
        before = {s: signal.signal(s, self.handle_exit) for s in signals}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == _HANGUP:
            return  # a terminal that closes may say so twice
        if self.should_exit:
            self.force_exit = True
            self.exit_code = 128 + sig
            # Requests are cut now; uvicorn would print a traceback for each.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
            return
        self.should_exit = True
        if self._llm.status().state == "ok":  # else nothing runs, and a failed load says so itself
            _log.info("stopping: running requests may finish (%g s); once more ends at once", self._drain_s)


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    """Python's default of 5 ms would let a busy HTTP thread hold up every engine step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
