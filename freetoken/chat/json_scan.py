"""Reads one JSON object character by character and writes it out as soon as it is certain.

Owns well-formedness: at any moment the text written is the prefix of a valid document. Forgives what
models get wrong without changing meaning: raw line ends in strings, unknown escapes, a comma before
a closing bracket, Python's True, False and None. White space between tokens is normalised.
Knows nothing of calls; `json_call.py` looks at `depth` to see where it is.
"""

from __future__ import annotations

import json
import re

_LITERAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_SPACE = " \t\r\n"
_CLOSER = {"{": "}", "[": "]"}


class JsonScan:
    """One document, which must be an object.

    `feed` takes one character and returns the text it makes certain, or None if the character can't
    stand here. `depth` is the number of open brackets, `mode` what is expected or being read:
    value, first_key, key, colon, string, literal, comma, end.
    """

    def __init__(self) -> None:
        self.mode = "value"
        self.reads_key = False
        self._stack: list[str] = []
        self._comma = ""
        self._literal = ""
        self._escape = ""

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def ended(self) -> bool:
        return self.mode == "end"

    def feed(self, char: str) -> str | None:
        if self.mode == "string":
            return self._string(char)
        if self.mode == "literal":
            return self._after_literal(char)
        if char in _SPACE:
            return ""
        if self.mode in ("value", "first_value"):
            return self._value(char)
        if self.mode in ("key", "first_key"):
            return self._key(char)
        if self.mode == "colon" and char == ":":
            self.mode = "value"
            return ": "
        if self.mode == "comma":
            return self._next(char)
        return None

    def _value(self, char: str) -> str | None:
        if not self._stack and char != "{":
            return None
        if char == '"':
            self.mode, self.reads_key = "string", False
        elif char in "{[":
            lead = self._take_comma()
            self._stack.append(char)
            self.mode = "first_key" if char == "{" else "first_value"
            return lead + char
        elif char == "]" and self._stack[-1] == "[" and (self.mode == "first_value" or self._comma):
            return self._close(char)
        elif char.isascii() and (char.isalnum() or char == "-"):
            self.mode, self._literal = "literal", char
            return self._take_comma()
        else:
            return None
        return self._take_comma() + char

    def _key(self, char: str) -> str | None:
        if char == '"':
            self.mode, self.reads_key = "string", True
            return self._take_comma() + char
        return self._close(char) if char == "}" else None

    def _next(self, char: str) -> str | None:
        if char == ",":
            self._comma = ", "
            self.mode = "key" if self._stack[-1] == "{" else "value"
            return ""
        return self._close(char)

    def _close(self, char: str) -> str | None:
        if char != _CLOSER[self._stack[-1]]:
            return None
        self._comma = ""
        self._stack.pop()
        self.mode = "comma" if self._stack else "end"
        return char

    def _take_comma(self) -> str:
        comma, self._comma = self._comma, ""
        return comma

    def _string(self, char: str) -> str | None:
        if self._escape:
            return self._escaped(char)
        if char == "\\":
            self._escape = char
            return ""
        if char == '"':
            self.mode = "colon" if self.reads_key else "comma"
            return char
        return char if char >= " " else json.dumps(char)[1:-1]

    def _escaped(self, char: str) -> str | None:
        """Hold an escape until it is whole, so that no piece ends inside one."""
        held = self._escape + char
        self._escape = ""
        if len(held) == 2 and char != "u":
            return held if char in '"\\/bfnrt' else "\\" + self._mend(held)
        if len(held) > 2 and char not in "0123456789abcdefABCDEF":
            self._escape = ""
            return None
        if len(held) == 6:
            return held
        self._escape = held
        return ""

    def _mend(self, held: str) -> str:
        """An unknown escape is a backslash that should have been doubled."""
        return "\\" + (held[1] if held[1] >= " " else json.dumps(held[1])[1:-1])

    def _after_literal(self, char: str) -> str | None:
        if char.isascii() and (char.isalnum() or char in "+-."):
            self._literal += char
            return ""
        text = _WORDS.get(self._literal, self._literal)
        if not _LITERAL.fullmatch(text):
            return None
        self.mode = "comma"
        after = self.feed(char)
        return None if after is None else text + after
