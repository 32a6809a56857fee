"""Builds a task from parameter and value pairs, under one of many names and wordings.

Knows nothing about particular tools; known.py, files.py, calculating.py and looking_up.py list those.
"""

import json

from demo.chats.dice import Dice
from demo.chats.tasks import Param, Task, styled, tool_schema


def param(
    d: Dice, names: str, kind: str, about: str, required: bool = True, choices: tuple[str, ...] = ()
) -> Param:
    """A parameter under one of the given names ("/"-separated)."""
    return Param(d.pick(names.split("/")), kind, about if d.chance(0.8) else "", required, choices)


def pack(
    d: Dice,
    names: str,
    about: list[str],
    pairs: list,
    queries: list[str],
    response: object,
    answers: list[str],
    why: str,
) -> Task:
    """A task from (Param, value) pairs; a value None leaves the argument out."""
    style = d.r.choices([0, 1, 2], [0.8, 0.15, 0.05])[0]
    name = styled(d.pick(names.split("/")).split(), style)
    args = {p.name: v for p, v in pairs if v is not None}
    text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    return Task(
        tool_schema(d, name, d.pick(about), [p for p, _ in pairs]),
        d.pick(queries),
        name,
        args,
        text,
        d.pick(answers),
        why,
    )
