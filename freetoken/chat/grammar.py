"""The table that drives the stream parser: states, markers, and where each marker leads.

A parser file under parsers/ is one `Grammar`. States are rows; the text between markers goes to the
row's sink. Knows neither tokens nor events.

    flow rows    `otherwise` is None: text goes to the sink until a marker comes
    expect rows  `otherwise` is set: only white space may come before a marker (and is dropped); anything
                 else leads to that row, or FAILs: the call is no call and its opener becomes text
    BACK         ends a call and returns to where it was opened from (that row's `resume`)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.chat.conversation import Tool

BACK = "back"
FAIL = "fail"
STOP = "stop"
START = "start"
THINKING = "thinking"


class Sink(enum.Enum):
    """Where the text of a row goes."""

    CONTENT = "content"
    REASONING = "reasoning"
    NOWHERE = "nowhere"  # between the parts of a call
    NAME = "name"
    KNOWN_NAME = "known name"  # a name that must be one of the tools on offer
    KEY = "key"
    VALUE = "value"
    JSON = "json"  # a call as one JSON object; ends by itself, rules play no part


SPOKEN = (Sink.CONTENT, Sink.REASONING)


@dataclass(frozen=True)
class State:
    """One row.

    rules      marker -> next row
    otherwise  see the module's docstring
    trim       drop line ends that come first when leaving through `otherwise`
    resume     row to return to after a call opened from here
    """

    sink: Sink
    rules: Mapping[str, str]
    otherwise: str | None = None
    trim: bool = False
    resume: str = START

    @property
    def spoken(self) -> bool:
        return self.sink in SPOKEN


@dataclass(frozen=True)
class Grammar:
    """A whole table. Every table has the rows `start` and, if it knows thoughts, `thinking`.

    think          the markers around thoughts, None if the format has none
    opens, closes  markers around blocks that agents replace whole, in prompts and answers
    write_call     (name, arguments) -> the text of such a call; None if the format has no calls
    call_rule      (tool, rule's name, mark) -> Lark rules for calls of one tool, whose parameters obey its
                   schema; `mark` writes a marker as a Lark term
    """

    states: Mapping[str, State]
    think: tuple[str, str] | None = None
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    write_call: Callable[[str, Mapping[str, Any]], str] | None = None
    call_rule: Callable[[Tool, str, Callable[[str], str]], str] | None = None

    def rows(self, *, tools: bool, stops: Sequence[str]) -> Iterator[tuple[str, State]]:
        """The rows for one answer: calls only if tools are on offer; stop strings end content."""
        for name, state in self.states.items():
            rules = {
                marker: after
                for marker, after in state.rules.items()
                if tools or not state.spoken or self.states[after].spoken
            }
            if state.sink is Sink.CONTENT and not state.trim:
                rules |= dict.fromkeys(stops, STOP)
            yield name, State(state.sink, rules, state.otherwise, state.trim, state.resume)


def spoken_rows(calls: Mapping[str, str], think: tuple[str, str] | None) -> dict[str, State]:
    """Make the rows for content and thoughts that formats share.

    calls  opener of a call -> its first row
    think  opening and closing marker of thoughts

    A thought may open only before the answer's first word, so that an answer can speak about markers.
    A call may open inside a thought, as models forget to close it, and returns into it.
    """
    rows = {
        "lead": State(Sink.CONTENT, calls, otherwise="content", trim=True, resume="lead"),
        "content": State(Sink.CONTENT, calls, resume="lead"),
    }
    if think is None:
        return {START: State(Sink.CONTENT, calls, otherwise="content", resume="lead"), **rows}
    opened, closed = think
    inside = {closed: "lead", **calls}
    return {
        START: State(Sink.CONTENT, {opened: THINKING, **calls}, otherwise="content", resume="lead"),
        THINKING: State(Sink.REASONING, inside, otherwise="reasoning", trim=True, resume=THINKING),
        "reasoning": State(Sink.REASONING, inside, resume=THINKING),
        **rows,
    }
