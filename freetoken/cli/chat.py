"""`ft chat`: talk to a running server, or to an engine of our own if none runs.

Owns the conversation of one sitting and its commands (/help lists them). Nothing is stored on disk.
Ctrl-C stops an answer; at the prompt it asks before leaving, Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys

from freetoken.chat.conversation import Conversation, Message
from freetoken.cli import _banner, _options, _sampling, _turn
from freetoken.cli._remote import find_server
from freetoken.cli._session import LocalSession, Session, quiet_log, start_engine
from freetoken.cli._terminal import Terminal
from freetoken.cli._tools import OFFERED
from freetoken.core.errors import ConfigError, FreeTokenError, nearest
from freetoken.core.generate import GenerateParams

HELP = "chat in the terminal, with a running server or an engine of its own"
COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation",
    "/think": "on, off, auto: let the model think; show, fold, hide: how thinking is printed",
    "/system": "set the system message (and forget the conversation)",
    "/tools": "on or off: offer the local calculator to the model",
    "/stats": "counters of the engine",
    "/exit": "leave (so does Ctrl-D)",
}
_ENGINE_GROUPS = ("model", "device", "experts", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local", action="store_true", help="start an engine even if a server runs")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--tools", action="store_true", help="offer the local calculator to the model")
    parser.add_argument("--prompt", metavar="TEXT", help="say this first, and leave after the answer")
    _sampling.add_sampling_flags(parser)
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    resolved = _options.resolve(args)
    out = Terminal(sys.stdout)
    _options.say_notes(resolved, Terminal(sys.stderr))
    quiet_log(resolved.options, resolved.origin["log_level"] != "default")
    params = _sampling.sampling_params(args, resolved.options)
    session = _session(args, resolved, out)
    try:
        room = _Room(session, params, out, args)
        if args.prompt is not None:
            return room.say(args.prompt)
        room.greet()
        return room.talk()
    finally:
        session.close()


def _session(args: argparse.Namespace, resolved: _options.Resolved, out: Terminal) -> Session:
    """A running server, unless the user asks for an engine with flags that only an engine can follow."""
    options = resolved.options
    given = _options.names_in(_ENGINE_GROUPS)
    wants_engine = args.local or any(resolved.origin[n] == "flag" for n in given)
    if not wants_engine:
        server = find_server(options.host, options.port, options.api_key)
        if server is not None:
            return server
    engine, progress = start_engine(options, out)
    out.line(out.dim(f"engine ready in {progress.seconds:.1f} s: {engine.plan.lines()[0]}"))
    return LocalSession(engine)


class _Room:
    """One sitting: the messages so far and how answers are shown."""

    def __init__(
        self, session: Session, params: GenerateParams, out: Terminal, args: argparse.Namespace
    ) -> None:
        self.out = out
        self.turn = _turn.Turn(session, params, out)
        self.turn.tools = OFFERED if args.tools else ()
        self.system = args.system or ""
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [Message.make("system", self.system)] if self.system else []

    def greet(self) -> None:
        session, out = self.turn.session, self.out
        out.line(f"{out.bold(session.model_name)} {session.place}")
        if session.model_name == _banner.DEMO_NAME:
            out.wrapped(_banner.DEMO_NOTE)
            _banner.suggestions(out)
            out.line(f"  With {out.accent('/tools on')}: {out.accent('What is 48 times 73?')}")
        out.line(out.dim("  /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves"))

    def talk(self) -> int:
        _line_editing()
        while True:
            try:
                text = self._read()
            except EOFError:
                self.out.line()
                return 0
            except KeyboardInterrupt:
                self.out.line(self.out.dim("  (Ctrl-D or /exit leaves)"))
                continue
            if text in ("/exit", "/quit"):
                return 0
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.say(text)

    def say(self, text: str) -> int:
        """Ask and show the answer; an error is printed and leaves the conversation as it was."""
        asked = [*self.messages, Message.make("user", text)]
        try:
            self.messages = self.turn.run(Conversation(tuple(asked)))
        except FreeTokenError as e:
            self.out.line(f"{self.out.bad(f'error [{e.code}]')}: {e.message}")
            if e.hint:
                self.out.line(f"  {e.hint}")
            return e.exit_code
        return 0

    def _read(self) -> str:
        """One entry; a line that ends with a backslash goes on."""
        lines = [input("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(". "))
        return "\n".join(lines).strip()

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if word == "/help":
            self.out.table(("command", ""), list(COMMANDS.items()))
        elif word == "/reset":
            self.reset()
            self.out.line(self.out.dim("  forgotten"))
        elif word == "/system":
            self.system = rest
            self.reset()
            self.out.line(self.out.dim(f"  system message {'set' if rest else 'removed'}"))
        elif word == "/tools":
            self.turn.tools = () if rest == "off" else OFFERED
            names = ", ".join(t.name for t in self.turn.tools) or "none"
            self.out.line(self.out.dim(f"  tools on offer: {names}"))
        elif word == "/think":
            self._think(rest)
        elif word == "/stats":
            self._stats()
        else:
            self.out.line(f"  There is no {word}. {nearest(word, COMMANDS) or 'See /help.'}")

    def _think(self, word: str) -> None:
        try:
            said = self.turn.set_thinking(word)
        except ConfigError as e:
            said = f"{e.message} {e.hint}"
        self.out.line(self.out.dim(f"  {said}"))

    def _stats(self) -> None:
        rows = [(k, v) for k, v in _flat(self.turn.session.stats())]
        self.out.table(("counter", "value"), rows)


def _flat(body: object, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(body, dict):
        return [row for k, v in body.items() for row in _flat(v, f"{prefix}.{k}" if prefix else str(k))]
    return [(prefix, f"{body:.4g}" if isinstance(body, float) else str(body))]


def _line_editing() -> None:
    """Arrow keys and history within the sitting, where Python has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
