"""`ft serve`: listen, load the model, say what was decided and why, serve until told to stop.

The port is taken first and answers `loading` while the model loads in a thread of its own. A failed
load stops the server and becomes the command's error.

    exit codes   0 stopped, every request finished · 6 stopped, requests aborted after --drain-seconds
                 130 a second Ctrl-C · others as for every command
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from freetoken.api import ports
from freetoken.cli import _banner, _options
from freetoken.cli._session import Engine
from freetoken.cli._terminal import Progress, Terminal
from freetoken.core import log
from freetoken.core.errors import FreeTokenError

HELP = "serve a model over HTTP (OpenAI API), by default on http://127.0.0.1:1919"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    resolved = _options.resolve(args)
    options = resolved.options
    log.configure(options.log_level, options.log_file, options.log_json)
    out = Terminal(sys.stderr)
    _options.say_notes(resolved, out)
    sock = ports.bind(options.host, options.port)
    # Late: torch and the server's packages are not needed to refuse a wrong option or a taken port.
    from freetoken.api import server
    from freetoken.llm import LLM

    llm = LLM(options)
    loader = _Loader(llm, out)
    try:
        code = server.run(llm, options, sock=sock, on_ready=loader.start)
    finally:
        loader.stop()
        llm.close()
        sock.close()
    if loader.error is not None:
        raise loader.error
    return code


class _Loadable(Engine, Protocol):
    def load(self, progress: Callable[[str, int], None], *, early: bool) -> None: ...


class _Unwanted(Exception):
    """Ends a load that a stop of the server has made useless."""


class _Loader:
    """Loads the model beside the server; a failure stops the server."""

    def __init__(self, llm: _Loadable, out: Terminal) -> None:
        self.error: Exception | None = None
        self._llm, self._out = llm, out
        self._url = ""
        self._unwanted = False
        self._thread = threading.Thread(target=self._load, name="freetoken-load", daemon=True)

    def start(self, url: str) -> None:
        self._url = url
        self._out.line(f"{self._out.bold('listening')} on {url} (answers once the model is loaded)")
        self._thread.start()

    def stop(self) -> None:
        """Nobody wants the model any more: a load under way ends at its next report of progress."""
        self._unwanted = True
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def _load(self) -> None:
        progress = Progress(self._out, plain_lines=True)

        def report(phase: str, percent: int) -> None:
            if self._unwanted:
                raise _Unwanted
            progress(phase, percent)

        try:
            self._llm.load(report, early=True)
        except _Unwanted:
            progress.finish()
            return
        except Exception as e:
            self.error = e if isinstance(e, FreeTokenError) else _wrapped(e)
            progress.finish()
            # The server's own handler for this signal runs in the main thread and drains.
            signal.raise_signal(signal.SIGTERM)
            return
        progress.finish()
        if self._unwanted:
            return
        _banner.banner(self._llm, progress, self._out)
        self._out.line(f"{self._out.bold('ready')}    {self._out.accent(self._url)}   (Ctrl-C stops)")


def _wrapped(error: Exception) -> FreeTokenError:
    log.logger("cli").debug("loading failed", exc_info=error)
    return FreeTokenError(
        f"Loading failed: {type(error).__name__}: {error}",
        hint="See the traceback with --log-level debug; ft doctor checks the installation.",
    )
