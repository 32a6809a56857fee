"""What the commands print with: colour where it is wanted, a progress line, columns.

Knows no command and no engine. Invariant: without a terminal (a pipe, a log, NO_COLOR) the output is
plain text, one whole line at a time, with nothing overwritten.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from freetoken.core import env

_CODES = {"bold": "1", "dim": "2", "italic": "3", "good": "32", "warn": "33", "bad": "31", "accent": "36"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Terminal:
    """One output stream. `live` says whether a line may be overwritten."""

    def __init__(self, stream: TextIO, *, color: bool | None = None) -> None:
        self.stream = stream
        self.live = stream.isatty()
        self.color = self.live and not env.no_color() if color is None else color
        self._transient = False

    @property
    def width(self) -> int:
        return max(40, min(shutil.get_terminal_size((100, 24)).columns, 120))

    def style(self, text: str, *names: str) -> str:
        if not self.color or not text:
            return text
        return f"\x1b[{';'.join(_CODES[n] for n in names)}m{text}\x1b[0m"

    def bold(self, text: str) -> str:
        return self.style(text, "bold")

    def dim(self, text: str) -> str:
        return self.style(text, "dim")

    def good(self, text: str) -> str:
        return self.style(text, "good")

    def warn(self, text: str) -> str:
        return self.style(text, "warn")

    def bad(self, text: str) -> str:
        return self.style(text, "bold", "bad")

    def accent(self, text: str) -> str:
        return self.style(text, "accent")

    def write(self, text: str) -> None:
        """Write text as it streams, removing a transient line first."""
        self.clear()
        self._put(text)
        self.stream.flush()

    def line(self, text: str = "") -> None:
        self.write(text + "\n")

    def wrapped(self, text: str, indent: str = "  ") -> None:
        """Print a paragraph broken at the terminal's width."""
        body = textwrap.fill(
            text, self.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        self.line(body)

    def title(self, text: str) -> None:
        self.line()
        self.line(self.bold(text))

    def transient(self, text: str) -> None:
        """Show a line that the next output replaces; nothing where lines can't be replaced."""
        if not self.live:
            return
        self._put("\r\x1b[2K" + text[: self.width + 20])
        self.stream.flush()
        self._transient = True

    def clear(self) -> None:
        if self._transient:
            self._put("\r\x1b[2K")
            self._transient = False

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> None:
        """Print columns; a column whose cells are numbers is aligned right."""
        cells = [list(header), *[list(r) for r in rows]]
        widths = [max(visible(r[i]) for r in cells) for i in range(len(header))]
        right = [all(_numeric(r[i]) for r in rows) for i in range(len(header))]
        for n, row in enumerate(cells):
            padded = [pad(c, w, right=r) for c, w, r in zip(row, widths, right, strict=True)]
            text = indent + "  ".join(padded).rstrip()
            self.line(self.dim(text) if n == 0 else text)

    def _put(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            # A console with a narrow code page (Windows, LC_ALL=C) shows what it can.
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "replace").decode(encoding))


def visible(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def pad(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - visible(text))
    return space + text if right else text + space


def printable(text: str) -> str:
    """Strip control characters: a model must not drive the user's terminal."""
    return _CONTROL.sub("", text)


def _numeric(text: str) -> bool:
    bare = _ESCAPE.sub("", text).strip()
    return not bare or bare[0].isdigit() or bare[0] in "-+~" or bare in ("n/a",)


class Progress:
    """Load progress: one line that moves on a terminal; elsewhere one line per phase, or nothing.

    Is the `progress` callable of the engine: phase, percent 0..100. `phase (12 of 70)` is the same phase.
    """

    def __init__(self, out: Terminal, *, plain_lines: bool = False) -> None:
        self.out = out
        self.plain_lines = plain_lines
        self.started = time.monotonic()
        self.seconds = 0.0
        self._phase = ""
        self._since = self.started
        self._phases: list[tuple[str, float]] = []

    def __call__(self, phase: str, percent: int) -> None:
        now = time.monotonic()
        name = phase.partition(" (")[0]
        if name != self._phase:
            self._close(now)
            self._phase, self._since = name, now
            if self.plain_lines and not self.out.live:
                self.out.line(f"  {percent:3d} %  {name}")
        filled = max(0, min(20, percent // 5))
        bar = "#" * filled + "." * (20 - filled)
        self.out.transient(f"  [{bar}] {percent:3d} %  {phase}  {now - self.started:.1f} s")

    def finish(self) -> None:
        """Remove the line and note the whole time in `seconds`."""
        now = time.monotonic()
        self._close(now)
        self.out.clear()
        self.seconds = now - self.started

    def breakdown(self) -> str:
        """`weights 1.2 s, experts 0.8 s`: phases that took a while."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases if seconds >= 0.05)

    def _close(self, now: float) -> None:
        if self._phase:
            self._phases.append((self._phase, now - self._since))
        self._phase = ""
