"""The table that drives the stream parser: states, markers, and where each marker leads.

A parser file under parsers/ is one `Grammar`. States are rows; the text between markers goes to the
row's sink. Knows neither tokens nor events.

    flow rows    `otherwise` is None: text goes to the sink until a marker comes
    expect rows  `otherwise` is set: only white space may come before a marker (and is dropped); anything
                 else leads to that row, or FAILs: the call is no call and its opener becomes text
    header rows  expect rows between two pieces of speech: who speaks, in which channel. An answer that ends
                 inside one has said nothing there
    BACK         ends a call and returns to where it was opened from (that row's `resume`)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    HEADER = "header"
    NOWHERE = "nowhere"  # between the parts of a call
    NAME = "name"
    KNOWN_NAME = "known name"  # a name that must be one of the tools on offer
    KEY = "key"
    VALUE = "value"
    JSON = "json"  # a call as one JSON object; ends by itself, rules play no part
    ARGUMENTS = "arguments"  # a named call's arguments as one JSON object; likewise


SPOKEN = (Sink.CONTENT, Sink.REASONING)


@dataclass(frozen=True)
class State:
    """One row.

    rules      marker -> next row
    otherwise  see the module's docstring
    trim       drop line ends that come first when leaving through `otherwise`
    resume     row to return to after a call opened from here
    joint      said first if the answer has said something before, and goes on
    """

    sink: Sink
    rules: Mapping[str, str]
    otherwise: str | None = None
    trim: bool = False
    resume: str = START
    joint: str = ""

    @property
    def spoken(self) -> bool:
        return self.sink in SPOKEN


@dataclass(frozen=True)
class Think:
    """The markers around thoughts.

    forced   (are tools on offer) -> the text that ends a thought whose budget is used up
    late     prompts end before the opener; it is added where a budget or a form must know of the thought
    inline   clients may send thoughts back inside the text of an answer
    """

    open: str
    close: str
    forced: Callable[[bool], str] | None = None
    late: bool = False
    inline: bool = True

    def ending(self, tools: bool) -> str:
        return self.forced(tools) if self.forced else f"\n{self.close}\n\n"


Calls = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Grammar:
    """A whole table. Every table has the rows `start` and, if it knows thoughts, `thinking`.

    think          the markers around thoughts, None if the format has none
    opens, closes  markers around blocks that agents replace whole, in prompts and answers
    marks          further markers that are tokens and must reach the reader
    stops          markers that end an answer
    calls          rows that belong to calls only; none given: what no speech can be reached through
    one_call       an answer ends with its first call
    answer_head    what the text of an answer begins with behind a thought
    efforts        how the template calls an effort of reasoning that it has no word for
    write_call     (name, arguments) -> the text of such a call; None if the format has no calls
    write_answer   (thought, text, calls, is the thought open already) -> a whole answer; None: markers around
                   the thought, then the text, then the calls
    call_rule      (tool, rule's name, mark) -> Lark rules for calls of one tool, whose parameters obey its
                   schema; `mark` writes a marker as a Lark term
    """

    states: Mapping[str, State]
    think: Think | None = None
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    calls: frozenset[str] = frozenset()
    one_call: bool = False
    answer_head: str = ""
    efforts: Mapping[str, str] = field(default_factory=dict)
    write_answer: Callable[[str, str, Calls, bool], str] | None = None
    write_call: Callable[[str, Mapping[str, Any]], str] | None = None
    call_rule: Callable[[Tool, str, Callable[[str], str]], str] | None = None

    def rows(self, *, tools: bool, stops: Sequence[str]) -> Iterator[tuple[str, State]]:
        """The rows for one answer: calls only if tools are on offer; stop strings end content."""
        for name, state in self.states.items():
            rules = {
                marker: after
                for marker, after in state.rules.items()
                if tools or not self._begins_call(state, after)
            }
            if state.sink is Sink.CONTENT and not state.trim:
                rules |= dict.fromkeys(stops, STOP)
            yield name, replace(state, rules=rules)

    def _begins_call(self, state: State, after: str) -> bool:
        if self.calls:
            return after in self.calls
        return state.spoken and not self.states[after].spoken


def spoken_rows(calls: Mapping[str, str], think: Think | None) -> dict[str, State]:
    """Make the rows for content and thoughts that formats share.

    calls  opener of a call -> its first row
    think  the markers of thoughts

    A thought may open only before the answer's first word, so that an answer can speak about markers.
    A call may open inside a thought, as models forget to close it, and returns into it.
    """
    rows = {
        "lead": State(Sink.CONTENT, calls, otherwise="content", trim=True, resume="lead"),
        "content": State(Sink.CONTENT, calls, resume="lead"),
    }
    if think is None:
        return {START: State(Sink.CONTENT, calls, otherwise="content", resume="lead"), **rows}
    inside = {think.close: "lead", **calls}
    return {
        START: State(Sink.CONTENT, {think.open: THINKING, **calls}, otherwise="content", resume="lead"),
        THINKING: State(Sink.REASONING, inside, otherwise="reasoning", trim=True, resume=THINKING),
        "reasoning": State(Sink.REASONING, inside, resume=THINKING),
        **rows,
    }
