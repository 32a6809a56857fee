"""A scripted model's lines: which answer belongs to a conversation, and its text in a model's own form.

A script is a file of JSON lines, one turn each; the first whose `when` fits the conversation is said:

    {"when": {"answers": 0, "tool": "bash"}, "think": "...", "say": "...", "calls": [{"name", "arguments"}]}

    answers  number of assistant turns so far        tools  true or false: are tools on offer
    results  number of tool results so far           tool   a tool of this name is on offer
    last     regular expression found in the last turn that is not the system's

Knows no tokens and no engine; the model's tokenizer, scheduler, cache and forward all run for real.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from freetoken.chat.conversation import Conversation
from freetoken.chat.grammar import Grammar
from freetoken.core.errors import ConfigError, RequestError


class Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class When(msgspec.Struct, forbid_unknown_fields=True):
    """All that is given must hold."""

    answers: int | None = None
    results: int | None = None
    tools: bool | None = None
    tool: str | None = None
    last: str | None = None

    def fits(self, conversation: Conversation) -> bool:
        turns, offered = conversation.messages, conversation.offered_tools
        roles = [turn.role for turn in turns]
        last = next((turn.content for turn in reversed(turns) if turn.role != "system"), "")
        return (
            self.answers in (None, roles.count("assistant"))
            and self.results in (None, roles.count("tool"))
            and self.tools in (None, bool(offered))
            and (self.tool is None or any(tool.name == self.tool for tool in offered))
            and (self.last is None or re.search(self.last, last) is not None)
        )


class Line(msgspec.Struct, forbid_unknown_fields=True):
    when: When = msgspec.field(default_factory=When)
    think: str = ""
    say: str = ""
    calls: list[Call] = []


_DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True)
class Script:
    lines: tuple[Line, ...]

    @classmethod
    def from_file(cls, path: Path) -> Script:
        """Read a script. ConfigError `unreadable_file` or `invalid_script` names the line."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The script {path} can't be read: {error}.",
                code="unreadable_file",
                hint="Give the path of a file of JSON lines: --model script:FILE",
            ) from error
        rows = [(i, row) for i, row in enumerate(text.splitlines(), 1) if row.strip()]
        return cls(tuple(_line(path, i, row) for i, row in rows))

    def answer(self, conversation: Conversation, grammar: Grammar, *, in_thinking: bool) -> str:
        """The text to say next; RequestError `script_has_no_line` if no line fits."""
        line = next((line for line in self.lines if line.when.fits(conversation)), None)
        if line is None:
            roles = [turn.role for turn in conversation.messages]
            raise RequestError(
                f"The script has no line for {roles.count('assistant')} answers, {roles.count('tool')} "
                f"results and {len(conversation.offered_tools)} tools.",
                code="script_has_no_line",
                hint="Add a line without `when` at the end.",
            )
        return written(line, grammar, in_thinking=in_thinking)


def written(line: Line, grammar: Grammar, *, in_thinking: bool) -> str:
    """A line as the model would write it. `in_thinking`: the prompt ended inside an open thought."""
    if grammar.write_answer is not None:
        calls = [(call.name, call.arguments) for call in line.calls]
        return grammar.write_answer(line.think, line.say, calls, in_thinking)
    parts = [line.say] if line.say else []
    if line.calls and grammar.write_call is None:
        raise RequestError(
            "The script calls a tool, but this model has no form for calls.",
            code="script_has_no_line",
            hint="Leave `calls` out.",
        )
    parts += [_write(grammar, call.name, call.arguments) for call in line.calls]
    text = "\n\n".join(parts[:2]) + "".join(f"\n{part}" for part in parts[2:])
    if grammar.think is None or not (in_thinking or line.think):
        return text
    opening = "" if in_thinking else f"{grammar.think.open}\n"
    return f"{opening}{line.think}\n{grammar.think.close}\n\n{text}"


def _write(grammar: Grammar, name: str, arguments: Mapping[str, Any]) -> str:
    assert grammar.write_call is not None
    return grammar.write_call(name, arguments)


def _line(path: Path, number: int, row: str) -> Line:
    try:
        line = _DECODER.decode(row)
        re.compile(line.when.last or "")
    except (msgspec.DecodeError, re.error) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}.",
            code="invalid_script",
            hint='A line is like {"when": {"answers": 0}, "say": "Hello."}.',
        ) from error
    return line
