"""The form of a parser's specimens: what a model wrote, and what a reader should get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.chat.conversation import Tool


@dataclass(frozen=True)
class Example:
    """calls: (name, arguments) in order; in_thinking: the prompt ended inside an open thought."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    tools: tuple[Tool, ...] = ()
    in_thinking: bool = False


def tool(name: str, **types: object) -> Tool:
    """A tool whose parameters have the given types, or the given schemas."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    return Tool(name, f"Calls {name}.", {"type": "object", "properties": properties})
