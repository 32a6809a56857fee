"""Reads a call written as one JSON object, `{"name": ..., "arguments": {...}}`, as it streams.

Keys may come in any order, `parameters` is another word for `arguments`, which may also be JSON
inside a string; other keys are skipped. The call is announced once the name is known and the
arguments have begun; what is wrong before that point makes the text no call. Formats that write the name
elsewhere leave the arguments alone (`JsonArgumentsReader`).
"""

from __future__ import annotations

import json

from freetoken.chat.call_writer import CallWriter, is_name
from freetoken.chat.conversation import parse_arguments
from freetoken.chat.json_scan import JsonScan

_ARGUMENTS = ("arguments", "parameters")


class JsonCallReader:
    """One call. Feed characters while `state` is "reading".

    state  reading, done, failed (not announced: it is text) or broken (announced, but went wrong);
           the character that made it fail was not used
    """

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._scan = JsonScan()
        self._text = ""
        self._key: str | None = None
        self._name: str | None = None
        self._held = ""
        self._arguments_whole = False
        self.state = "reading"

    def feed(self, char: str) -> None:
        text = self._scan.feed(char)
        if text is None:
            self.break_off()
        elif self._scan.ended:
            self._finish()
        elif self._key is None:
            self._text += text
            if text == ": ":
                self._key = json.loads(self._text.lstrip("{, ").removesuffix(text))
                self._text = ""
        else:
            self._in_value(text)
            if self._scan.depth == 1 and self._scan.mode in ("comma", "key"):
                self._end_value(self._key)

    def break_off(self) -> None:
        """The stream ended here, or what comes is no JSON."""
        if self._calls.is_open:
            self._calls.end(complete=self._arguments_whole)
            self.state = "broken"
        else:
            self.state = "failed"

    def _in_value(self, text: str) -> None:
        is_object = (self._text or text).startswith("{")
        if self._key in _ARGUMENTS and is_object and not self._arguments_whole:
            self._text = "{"
            self._write(text)
        else:
            self._text += text

    def _end_value(self, key: str) -> None:
        text, self._text, self._key = self._text, "", None
        if key == "name" and self._name is None:
            name = json.loads(text)
            if not is_name(name):
                return self.break_off()
            self._name = name
            if self._held:
                self._write("")
        elif key in _ARGUMENTS and not self._arguments_whole:
            self._end_arguments(text)
        return None

    def _end_arguments(self, text: str) -> None:
        if text != "{":
            inner = json.loads(text)
            if inner is None:
                return None
            if not isinstance(inner, str) or isinstance(parse_arguments(inner), str):
                return self.break_off()
            self._write(inner.strip() or "{}")
        self._arguments_whole = True
        return None

    def _write(self, text: str) -> None:
        self._held += text
        if self._name is not None:
            if not self._calls.is_open:
                self._calls.start(self._name)
            self._calls.arguments(self._held)
            self._held = ""

    def _finish(self) -> None:
        if self._name is None:
            return self.break_off()
        if not self._calls.is_open:
            self._write("{}")
        self._calls.end(complete=True)
        self.state = "done"
        return None


class JsonArgumentsReader:
    """The arguments of a call whose name is known: one object, passed on as it becomes certain.

    state  reading, done, or broken; the character that broke it was not used
    """

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._scan = JsonScan()
        self.state = "reading"

    def feed(self, char: str) -> None:
        text = self._scan.feed(char)
        if text is None:
            self.break_off()
            return
        self._calls.arguments(text)
        if self._scan.ended:
            self._calls.end(complete=True)
            self.state = "done"

    def break_off(self) -> None:
        """The stream ended here, or what comes is no JSON."""
        self._calls.end(complete=False)
        self.state = "broken"
