"""Part of `ft demo`: one answer from four placements of the experts, counters beside, then less memory.

Owns what a placement is and which sums its counters must obey. Figures of a simulated machine are
labelled so wherever they are shown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import Event, fold
from freetoken.cli._session import Engine, LocalSession, Stream
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.core.units import MIB, format_bytes

MACHINE = "4060-laptop"
SIM_MEMORY = 48 * MIB
AMPLE_MEMORY = 96 * MIB
PROMPT = "What is 347 + 586?"
GREEDY = GenerateParams(temperature=0.0, max_tokens=160, thinking="on")
COLUMNS = (
    "placement",
    "same text",
    "hits",
    "misses",
    "fills",
    "CPU tiles",
    "over link",
    "read on CPU",
    "tok/s",
)
_MOVES = ("hits", "misses", "fills", "cpu_tiles", "link_bytes", "host_bytes")


@dataclass(frozen=True)
class Placement:
    """One way to place experts. `must_move` are the counters that have to be above zero."""

    label: str
    options: Options
    must_move: tuple[str, ...]


def placements() -> tuple[Placement, ...]:
    """The four placements, the reference first."""

    def simulated(backend: str, *must_move: str) -> Placement:
        return Placement(f"{backend}, 4060 laptop (simulated)", laptop(backend, SIM_MEMORY), must_move)

    return (
        Placement("fused, this CPU", Options(device="cpu", moe_backend="fused"), ()),
        simulated("offload", "hits", "misses", "fills", "link_bytes"),
        simulated("cpu", "cpu_tiles", "host_bytes"),
        simulated("hybrid", *_MOVES),
    )


def laptop(backend: str, gpu_memory: int) -> Options:
    """A simulated laptop whose GPU memory is small enough for the demo model not to fit."""
    return Options(
        device="sim",
        machine=MACHINE,
        moe_backend=backend,
        gpu_memory=gpu_memory,
        kv_reserve_tokens=1024,
        max_running_requests=4,
        max_prefill_length=512,
    )


@dataclass(frozen=True)
class Outcome:
    """What one placement answered and counted."""

    placement: Placement
    text: str
    experts: Mapping[str, Any]
    rate: float

    @property
    def requests(self) -> int:
        return int(self.experts.get("requests", 0))

    def row(self, reference: str) -> tuple[str, ...]:
        e = self.experts
        link = e.get("link_bytes", 0) + e.get("prefill_link_bytes", 0)
        return (
            self.placement.label,
            "yes" if self.text == reference else "NO",
            str(e.get("hits", 0)),
            str(e.get("misses", 0)),
            str(e.get("fills", 0)),
            str(e.get("cpu_tiles", 0)),
            format_bytes(link),
            format_bytes(e.get("host_bytes", 0)),
            f"{self.rate:.0f}" if self.rate else "-",
        )

    def faults(self, reference: str) -> list[str]:
        """Sentences about what does not hold: the text, a counter at zero, a sum."""
        e, label = self.experts, self.placement.label
        out = [] if self.text == reference else [f"{label}: another text than the reference"]
        out += [f"{label}: {name} is zero" for name in self.placement.must_move if not e.get(name)]
        if e.get("hits", 0) + e.get("misses", 0) != e.get("requests", 0):
            out.append(f"{label}: hits + misses is not requests")
        if e.get("filled_tiles", 0) + e.get("cpu_tiles", 0) != e.get("missing_tiles", 0):
            out.append(f"{label}: filled + CPU tiles is not missing tiles")
        return out


def conversation() -> Conversation:
    return Conversation((Message.make("user", PROMPT),))


def answer(placement: Placement, engine: Engine) -> Outcome:
    """Ask the engine of a placement the one question."""
    found = fold(LocalSession(engine).ask(conversation(), GREEDY))
    stats = engine.stats()
    rate = float((stats.get("engine") or stats).get("decode_tok_s") or 0.0)
    return Outcome(placement, found.reasoning + found.content, stats.get("experts") or {}, rate)


class Shrinking:
    """A stream that halves the engine's GPU memory once the answer is on its way.

    before, after   (bytes, expert slots), taken from the engine's own stats
    tokens_left     events that came after the memory was gone
    """

    def __init__(self, engine: Engine, after_events: int = 8) -> None:
        self.before = self.after = _memory(engine)
        self.error: Exception | None = None
        self.tokens_left = 0
        self._engine = engine
        self._inner: Stream = LocalSession(engine).ask(conversation(), GREEDY)
        self._after_events = after_events

    def __iter__(self) -> Iterator[Event]:
        """Give the answer's events; the resize runs beside them, as it would in a server."""
        resize = threading.Thread(target=self._resize, name="freetoken-demo-resize")
        for n, event in enumerate(self._inner):
            if n == self._after_events:
                resize.start()
            self.tokens_left += self.after != self.before
            yield event
        if resize.ident is not None:
            resize.join()

    def cancel(self) -> None:
        self._inner.cancel()

    def describe(self) -> str:
        (old, old_slots), (new, new_slots) = self.before, self.after
        sizes = f"{format_bytes(old)} with {old_slots} expert slots -> {format_bytes(new)} with {new_slots}"
        return f"{sizes}; {self.tokens_left} pieces of text came after that"

    def faults(self) -> list[str]:
        if self.error is not None:
            return [f"the memory is halved ({self.error})"]
        return [
            sentence
            for holds, sentence in (
                (self.after[0] * 2 == self.before[0], "the memory is halved"),
                (self.after[1] < self.before[1], "expert slots are given up"),
                (self.tokens_left > 0, "the answer goes on afterwards"),
            )
            if not holds
        ]

    def _resize(self) -> None:
        try:
            self._engine.resize_memory(AMPLE_MEMORY // 2)
        except Exception as e:
            self.error = e
        self.after = _memory(self._engine)


def _memory(engine: Engine) -> tuple[int, int]:
    memory = engine.stats().get("memory") or {}
    return int(memory.get("budget_bytes", 0)), int(memory.get("slots", 0))
