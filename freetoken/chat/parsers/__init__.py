"""One file, one way in which models write thoughts and tool calls.

A file states `GRAMMAR` (the table), `detect(template)` (does a chat template speak this format),
`RANK` (who goes first where several fit), `parse` (a whole answer at once) and `EXAMPLES`.
Files are found by their names; nobody else compares them.
"""

from __future__ import annotations

from typing import cast

from freetoken.chat.grammar import Grammar
from freetoken.core import choices


def names() -> list[str]:
    """The formats that exist."""
    return choices.names(__name__)


def grammar_for(template: str, name: str | None = None) -> Grammar:
    """Pick the table that fits a chat template's text, or the one called `name`.

    Raises ConfigError `unknown_choice` for a name that doesn't exist.
    """
    if name is not None:
        return cast(Grammar, choices.load(__name__, name).GRAMMAR)
    modules = [choices.load(__name__, known) for known in names()]
    best = max((module for module in modules if module.detect(template)), key=lambda module: int(module.RANK))
    return cast(Grammar, best.GRAMMAR)
