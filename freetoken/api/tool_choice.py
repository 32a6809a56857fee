"""Which tools an answer must call: the checks that all protocols share.

Knows no wire shape. A forced call is enforced by the form of the answer, not by asking for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from freetoken.chat.conversation import Tool
from freetoken.core.errors import RequestError, nearest

Kind: TypeAlias = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True)
class ToolChoice:
    """`name` is the tool's if the kind is `named`."""

    kind: Kind
    name: str | None = None


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice; RequestError `unknown_tool` if there is nothing to choose."""
    names = [tool.name for tool in tools]
    if choice.kind == "required" and not names:
        raise RequestError(
            "tool_choice requires a call, but no tools are on offer.",
            code="unknown_tool",
            hint="Send tools, or leave tool_choice out.",
            param="tool_choice",
        )
    if choice.kind == "named" and choice.name not in names:
        raise RequestError(
            f"tool_choice names {choice.name!r}, which is not on offer.",
            code="unknown_tool",
            hint=nearest(choice.name or "", names) or "Name one of the tools.",
            param="tool_choice",
        )
    return choice


def word_choice(word: str | None) -> ToolChoice:
    """OpenAI's words; null is auto."""
    words: dict[str | None, Kind] = {None: "auto", "auto": "auto", "none": "none", "required": "required"}
    if word not in words:
        raise RequestError(
            f"tool_choice is {word!r}.",
            code="out_of_range",
            hint="Use auto, none or required.",
            param="tool_choice",
        )
    return ToolChoice(words[word])
