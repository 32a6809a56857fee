"""Which tools an answer must call: the checks that all protocols share.

Knows no wire shape. Forced calls need an answer whose form is constrained; until the model can do
that they are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from freetoken.chat.conversation import Tool
from freetoken.core.errors import RequestError

Kind: TypeAlias = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True)
class ToolChoice:
    """`name` is the tool's if the kind is `named`."""

    kind: Kind
    name: str | None = None


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice; RequestError `unsupported_tool_choice` or `unknown_tool`."""
    if choice.kind in ("required", "named"):
        shown = "required" if choice.kind == "required" else "naming a function"
        raise RequestError(
            f"tool_choice {shown} is not supported.",
            code="unsupported_tool_choice",
            hint="Use auto, and ask for the tool in the prompt.",
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
