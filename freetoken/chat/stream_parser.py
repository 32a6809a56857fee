"""The one state machine behind reasoning, tool calls and stop strings: answer text in, events out.

Driven by a `Grammar` table; knows no tokens, no format and no protocol.
Invariant: every decision depends on the text so far and never on how it was cut, so any cut of the
stream gives the same answer. Three rules make it so:
- the leftmost marker wins, the longest at one place; text is held back only while it can still become
  one, and released when it can't, or when the stream ends;
- a call that turns out to be none before it was announced goes back to just behind its opener, which
  becomes text, and reading starts anew from there;
- after the announcement a call that goes wrong ends as incomplete, and what follows is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freetoken.chat.call_writer import CallWriter, ParameterWriter, is_name, new_call_id
from freetoken.chat.conversation import Tool
from freetoken.chat.events import Answer, Channel, Event, ReasoningDelta, TextDelta, fold, merged
from freetoken.chat.grammar import BACK, FAIL, SPOKEN, START, STOP, THINKING, Grammar, Sink, State
from freetoken.chat.json_call import JsonArgumentsReader, JsonCallReader


class _Row:
    """A state, ready to search: its markers, longest first, as one pattern."""

    def __init__(self, name: str, state: State) -> None:
        self.name = name
        self.state = state
        self.markers = sorted(state.rules, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        self._firsts = frozenset(marker[0] for marker in self.markers)
        self._reach = max(map(len, self.markers), default=1) - 1

    def held_from(self, text: str, pos: int) -> int:
        """Where the longest ending that may still grow into a marker begins; len(text) if none does."""
        for at in range(max(pos, len(text) - self._reach), len(text)):
            if text[at] in self._firsts and any(
                len(marker) > len(text) - at and marker.startswith(text[at:]) for marker in self.markers
            ):
                return at
        return len(text)


@dataclass
class _Opener:
    """Where a call was opened and not yet announced: what to say if it is none, and where to go on."""

    text: str
    end: int


class StreamParser:
    """One answer's text as events.

    tools        tools on offer; with none, markers of calls are ordinary text
    stop         stop strings, looked for in content only
    in_thinking  the prompt ended inside an open thought
    parallel     False ends the answer after the first call
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        in_thinking: bool = False,
        parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        rows = grammar.rows(tools=bool(tools), stops=[text for text in stop if text])
        self._rows = {name: _Row(name, state) for name, state in rows}
        self._row = self._rows[THINKING if in_thinking and THINKING in self._rows else START]
        self._events: list[Event] = []
        self._calls = CallWriter(self._events.append, new_id)
        self._parameters = ParameterWriter(self._calls, tools)
        self._json: JsonCallReader | JsonArgumentsReader | None = None
        self._parallel = parallel
        self._text = ""
        self._pos = 0
        self._space = ""
        self._has_spoken = False
        self._word = ""
        self._origin = self._row
        self._opener: _Opener | None = None
        self._final = False
        self.done = False
        self.stop_match: str | None = None

    @property
    def channel(self) -> Channel:
        """Where the text that comes next belongs."""
        sink = self._row.state.sink
        return "content" if sink is Sink.CONTENT else "reasoning" if sink is Sink.REASONING else "tool"

    @property
    def num_calls(self) -> int:
        return self._calls.count

    def feed(self, text: str) -> list[Event]:
        """Take text in; return the events that are certain now. Ignored once `done`."""
        self._text += text
        return self._run()

    def finish(self) -> list[Event]:
        """End the stream: release what was held back, end an open call."""
        self._final = True
        events = self._run()
        self.done = True
        return events

    def _run(self) -> list[Event]:
        while not self.done and self._step():
            pass
        if self.done:
            self._text, self._pos = "", 0
        kept = self._opener.end if self._opener else self._pos
        if kept:
            self._text, self._pos = self._text[kept:], self._pos - kept
            if self._opener:
                self._opener.end = 0
        events = merged(self._events)
        self._events.clear()
        return events

    def _step(self) -> bool:
        """Go on to the next marker; False if more text is needed."""
        state = self._row.state
        if state.sink in (Sink.JSON, Sink.ARGUMENTS):
            return self._read_json()
        found = self._row.pattern.search(self._text, self._pos)
        whole = self._final and state.sink is not Sink.HEADER  # half a header at the end is no text
        until = len(self._text) if whole else self._row.held_from(self._text, self._pos)
        if found and (self._final or found.start() < until):
            until = found.start()
        else:
            found = None
        before = self._text[self._pos : until]
        if state.otherwise is not None and before.strip():
            return self._leave_otherwise(state)
        if found:
            self._pos = found.end()
            return self._follow(found[0], before)
        if state.otherwise is None:
            self._pos = until
            if not self._write(before):
                return self._roll_back()
        return self._final and self._end_stream(before)

    def _follow(self, marker: str, before: str) -> bool:
        """Leave the row through a marker, which has `before` in front of it."""
        row, state, after = self._row, self._row.state, self._row.state.rules[marker]
        if after == STOP:
            self._speak(before)
            self._release_space()
            self.stop_match, self.done = marker, True
            return False
        if state.spoken and not self._rows[after].state.spoken:
            if state.otherwise is None:
                self._speak(before)
                before = ""
            before = before.lstrip("\r\n") if state.trim else before
            self._opener = _Opener(before + marker, self._pos)
            self._origin, self._json, self._word = row, JsonCallReader(self._calls), ""
        elif not self._write(before) or not self._leave(state.sink):
            return self._roll_back()
        if after == BACK:
            self._return()
        else:
            self._enter(self._rows[after], from_header=state.sink is Sink.HEADER)
        return True

    def _enter(self, row: _Row, *, from_header: bool) -> None:
        self._row = row
        if row.state.otherwise == BACK:
            self._end_call()
        elif row.state.sink is Sink.ARGUMENTS:
            self._json = JsonArgumentsReader(self._calls)
        elif from_header and row.state.spoken:
            self._commit()
            self._space = row.state.joint if self._has_spoken else ""

    def _leave(self, sink: Sink) -> bool:
        """Use what a row has gathered; False if a name is none."""
        word, self._word = self._word, ""
        if sink in SPOKEN:
            self._space = ""
        elif sink is Sink.VALUE:
            self._parameters.end_value()
        elif sink is Sink.KEY:
            self._parameters.key(word)
        elif sink in (Sink.NAME, Sink.KNOWN_NAME):
            if not is_name(word) or (sink is Sink.KNOWN_NAME and not self._parameters.knows(word)):
                return False
            self._commit()
            self._parameters.begin(word)
        return True

    def _leave_otherwise(self, state: State) -> bool:
        if state.otherwise == FAIL:
            return self._roll_back()
        if state.trim:
            while self._text[self._pos] in "\r\n":
                self._pos += 1
        if state.otherwise == BACK:
            self._return()
        else:
            self._row = self._rows[str(state.otherwise)]
        return True

    def _read_json(self) -> bool:
        reader, count = self._json, self._calls.count
        assert reader is not None
        while reader.state == "reading" and self._pos < len(self._text):
            reader.feed(self._text[self._pos])
            self._pos += reader.state in ("reading", "done")
        if reader.state == "reading" and self._final:
            reader.break_off()
        if self._calls.count > count:
            self._commit()
        if reader.state == "reading":
            return False
        if reader.state == "failed":
            return self._roll_back()
        self._row = self._rows[str(self._row.state.otherwise)]
        self._end_call()
        return True

    def _commit(self) -> None:
        """The call is real: what led to it is no text any more."""
        self._opener = None

    def _roll_back(self) -> bool:
        """No call after all: its opener is text, and reading goes on behind it."""
        assert self._opener is not None
        opener, self._opener = self._opener, None
        self._row = self._rows[self._origin.state.otherwise or self._origin.name]
        self._pos, self._word = opener.end, ""
        self._speak(opener.text)
        return True

    def _return(self) -> None:
        self._end_call()
        self._row = self._rows[self._origin.state.resume]

    def _end_call(self) -> None:
        if self._calls.is_open:
            self._parameters.end()
        self.done = self.done or (self._calls.count > 0 and not self._parallel)

    def _end_stream(self, before: str) -> bool:
        """Nothing more will come; True if a call that never was gives text back to read."""
        if self._opener is not None and self._row.state.sink is not Sink.HEADER:
            return self._roll_back()
        self._opener = None
        self._calls.end(complete=False)
        if self._row.state.sink is Sink.CONTENT and not self._row.state.trim:
            if self._row.state.otherwise is not None:
                self._speak(before)
            self._release_space()
        self._pos = len(self._text)
        return False

    def _write(self, text: str) -> bool:
        """Give text to the row's sink; False if it can't be part of a name."""
        sink = self._row.state.sink
        if sink in SPOKEN:
            self._speak(text)
        elif sink is Sink.VALUE:
            self._parameters.value(text)
        elif sink not in (Sink.NOWHERE, Sink.HEADER):
            self._word += text
            return sink is Sink.KEY or not self._word or is_name(self._word)
        return True

    def _speak(self, text: str) -> None:
        """Say text in the row's channel. White space at its end waits: it is dropped if a thought
        ends or only calls follow, and kept if the channel goes on."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        self._say(body)

    def _release_space(self) -> None:
        self._say(self._space)
        self._space = ""

    def _say(self, text: str) -> None:
        if text:
            reasons = self._row.state.sink is Sink.REASONING
            self._has_spoken = self._has_spoken or not reasons
            self._events.append(ReasoningDelta(text) if reasons else TextDelta(text))


def parse_whole(grammar: Grammar, text: str, tools: Sequence[Tool] = (), in_thinking: bool = False) -> Answer:
    """Read a whole answer at once: a stream of one piece."""
    parser = StreamParser(grammar, tools=tools, in_thinking=in_thinking)
    return fold([*parser.feed(text), *parser.finish()])
