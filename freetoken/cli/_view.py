"""An answer as it streams: text as it comes, thinking folded or dimmed, calls in a line, then figures.

Turns chat events into terminal output and measures them on the way. Knows no engine. Invariant: what
the model says can't drive the terminal, and Ctrl-C ends the answer only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.chat.events import (
    Answer,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from freetoken.cli._session import Stream
from freetoken.cli._terminal import Terminal, printable


@dataclass
class Shown:
    """A shown answer with its times in seconds. `rate` is tokens per second after the first."""

    answer: Answer = field(default_factory=Answer)
    first_s: float = 0.0
    total_s: float = 0.0
    pieces: int = 0
    interrupted: bool = False

    @property
    def tokens(self) -> int:
        finish = self.answer.finish
        return finish.usage.completion_tokens if finish and finish.usage.completion_tokens else self.pieces

    @property
    def rate(self) -> float:
        span = self.total_s - self.first_s
        return (self.tokens - 1) / span if span > 0 and self.tokens > 1 else 0.0


class AnswerView:
    """Shows one answer at a time. `thinking`: `fold` (one line), `show` (dimmed) or `hide`."""

    def __init__(self, out: Terminal, *, thinking: str = "fold", indent: str = "") -> None:
        self.out = out
        self.thinking = thinking
        self.indent = indent
        self._channel = ""
        self._thought_at = 0.0
        self._thoughts = 0

    def show(self, stream: Stream) -> Shown:
        """Print events as they come. Ctrl-C cancels the stream and marks the answer interrupted."""
        shown, started = Shown(), time.monotonic()
        try:
            for event in stream:
                now = time.monotonic() - started
                if not shown.pieces and not isinstance(event, Finish):
                    shown.first_s = now
                shown.pieces += isinstance(event, (TextDelta, ReasoningDelta, ToolCallDelta))
                shown.total_s = now
                shown.answer.add(event)
                self._event(event)
        except KeyboardInterrupt:
            stream.cancel()
            shown.interrupted = True
            shown.total_s = time.monotonic() - started
        self._switch("")
        return shown

    def _event(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self._switch("reasoning")
            self._thought(event.text)
        elif isinstance(event, TextDelta):
            text = event.text if self._channel == "content" else event.text.lstrip("\n")
            if text:
                self._switch("content")
                self._put(printable(text))
        elif isinstance(event, ToolCallStart):
            self._switch("tool")
            self.out.write(self.indent + self.out.accent(f"-> {printable(event.name)}("))
        elif isinstance(event, ToolCallDelta):
            self.out.write(self.out.accent(printable(event.arguments_text)))
        elif isinstance(event, ToolCallEnd):
            self.out.write(self.out.accent(")" if event.complete else " (broken off)") + "\n")
            self._channel = ""

    def _put(self, text: str) -> None:
        self.out.write(text.replace("\n", "\n" + self.indent) if self.indent else text)

    def _thought(self, text: str) -> None:
        self._thoughts += 1
        if self.thinking == "show":
            self.out.write(self.out.dim(printable(text).replace("\n", "\n" + self.indent)))
        elif self.thinking == "fold":
            seconds = time.monotonic() - self._thought_at
            self.out.transient(self.indent + self.out.dim(f"thinking ... {seconds:.1f} s"))

    def _switch(self, channel: str) -> None:
        """Close what is open on the line and open `channel`."""
        if channel == self._channel:
            return
        old, self._channel = self._channel, channel
        if old == "reasoning":
            self._end_thought()
        elif old:
            self.out.line()
        if channel == "reasoning":
            self._thought_at, self._thoughts = time.monotonic(), 0
        if channel == "content" or (channel == "reasoning" and self.thinking == "show"):
            self.out.write(self.indent)

    def _end_thought(self) -> None:
        if self.thinking == "show":
            self.out.line()
        elif self.thinking == "fold":
            seconds = time.monotonic() - self._thought_at
            self.out.line(self.indent + self.out.dim(f"(thought for {seconds:.1f} s)"))


def hit_rate(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Share of routed experts found on the GPU between two snapshots of stats; None without slots."""
    if not (after.get("memory") or {}).get("slots"):
        return None
    old, new = before.get("experts") or {}, after.get("experts") or {}
    hits = new.get("hits", 0) - old.get("hits", 0)
    misses = new.get("misses", 0) - old.get("misses", 0)
    return hits / (hits + misses) if hits + misses > 0 else None


def figures(shown: Shown, hits: float | None) -> str:
    """`42 tokens · 51.3 tok/s · first after 0.12 s · 92 % expert hits`."""
    parts = [f"{shown.tokens} tokens"]
    if shown.rate:
        parts.append(f"{shown.rate:.1f} tok/s")
    parts.append(f"first after {shown.first_s:.2f} s")
    if hits is not None:
        parts.append(f"{100 * hits:.0f} % expert hits")
    finish = shown.answer.finish
    if shown.interrupted:
        parts.append("stopped")
    elif finish and finish.reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)
