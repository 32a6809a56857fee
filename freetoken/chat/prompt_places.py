"""Which turn of a conversation a place in its rendered prompt belongs to.

Looks for the turns' own words in the text, in order, so it needs to know no template. A place between two
turns belongs to the later one: it is that turn's head. Approximate where a template rewrites what was said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.prompt_edit import Place


def place_of(conversation: Conversation, text: str, offset: int) -> Place:
    """Name the part of `text` in which the character at `offset` lies."""
    tools_end = _tools_end(conversation, text)
    if offset < tools_end:
        return Place(-1, "tools")
    # Tools stand ahead of everything or behind the first system turn; turns never lie between them.
    first = conversation.messages[0] if conversation.messages else None
    cursor = 0 if first is None or text.find(_words(first), 0, tools_end) >= 0 else tools_end
    for index, turn in enumerate(conversation.messages):
        end = _end_of(turn, text, cursor)
        if end > offset:
            return Place(index, f"turn {index} ({turn.role})")
        cursor = max(cursor, end)
    return Place(len(conversation.messages), "the template's end")


def _tools_end(conversation: Conversation, text: str) -> int:
    """Where the tools' declarations end; 0 without tools."""
    tools = conversation.offered_tools
    if not tools:
        return 0
    ends = [text.find(f'"{tool.name}"') + len(tool.name) for tool in tools if f'"{tool.name}"' in text]
    last = max(ends, default=0)
    words = json.dumps(tools[-1].description, ensure_ascii=False)[1:-1]
    return max(last, text.find(words, last) + len(words)) if words and last else last


def _end_of(turn: Message, text: str, cursor: int) -> int:
    """Where the last of a turn's words ends, at or behind `cursor`; `cursor` if none is found."""
    for words in _pieces(turn):
        found = text.find(words, cursor)
        if found >= 0:
            cursor = found + len(words)
    return cursor


def _pieces(turn: Message) -> Iterator[str]:
    """A turn's words in the order in which templates write them."""
    for words in (turn.reasoning, turn.content, *(call.name for call in turn.tool_calls)):
        if words.strip():
            yield words.strip()


def _words(turn: Message) -> str:
    return next(_pieces(turn), "\0")
