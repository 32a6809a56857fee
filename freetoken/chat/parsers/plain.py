"""Plain text: no thoughts, no calls. The slow default that every model can use."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.chat.conversation import Tool
from freetoken.chat.events import Answer
from freetoken.chat.grammar import Grammar, spoken_rows
from freetoken.chat.parsers._example import Example, tool
from freetoken.chat.stream_parser import parse_whole

RANK = 0
GRAMMAR = Grammar(spoken_rows({}, None))


def detect(template: str) -> bool:
    return True


def parse(text: str, tools: Sequence[Tool] = (), *, in_thinking: bool = False) -> Answer:
    """Read a whole answer."""
    return parse_whole(GRAMMAR, text, tools, in_thinking)


_SCRIPTS = "\u05e9\u05dc\u05d5\u05dd \ud55c\uae00 \U0001f469\u200d\U0001f4bb"

EXAMPLES = (
    Example("Hello, world.", "Hello, world."),
    Example(" \n indented\n\n", " \n indented\n\n"),
    Example("<think>a</think><tool_call>", "<think>a</think><tool_call>", tools=(tool("f"),)),
    Example(_SCRIPTS, _SCRIPTS),
    Example("", ""),
)
