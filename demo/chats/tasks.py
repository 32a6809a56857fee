# ruff: noqa: E501 - sentences and small makers read best on one line
"""A task: one request that needs one call of one tool, with the tool's answer and ours. And how schemas and values are spelt.

Knows nothing about particular tools. Invariant: a request names every argument so that it can be read off in one way only;
text of several words is quoted, or stands where it cannot be mistaken.
"""

import json
import re
from dataclasses import dataclass

from demo.chats.dice import Dice


@dataclass
class Task:
    """tool: schema; query: what the user says; name, args: the right call; response: the tool's text; answer: ours; why: infinitive.

    kind: tasks of one kind would fit each other's tools, so a chat offers only one of them.
    """

    tool: dict
    query: str
    name: str
    args: dict
    response: str
    answer: str
    why: str
    kind: str = ""


@dataclass(frozen=True)
class Param:
    """One parameter. kind: a JSON type, or strings/numbers/objects for arrays; fields: of an object or of the array's objects."""

    name: str
    kind: str = "string"
    about: str = ""
    required: bool = True
    choices: tuple[str, ...] = ()
    fields: tuple["Param", ...] = ()

    def schema(self, short: bool = False) -> dict:
        if self.kind == "object":
            d = _object(self.fields)
        elif self.kind == "objects":
            d = {"type": "array", "items": _object(self.fields)}
        elif self.kind in ("strings", "numbers"):
            d = {"type": "array", "items": {"type": "string" if self.kind == "strings" else "number"}}
        else:
            d = {"type": self.kind}
        if self.about and not short:
            d["description"] = self.about
        if self.choices:
            d["enum"] = list(self.choices)
        return d


def _object(fields: tuple[Param, ...]) -> dict:
    return {
        "type": "object",
        "properties": {f.name: f.schema() for f in fields},
        "required": [f.name for f in fields if f.required],
    }


def tool_schema(d: Dice, name: str, about: str, params: list[Param]) -> dict:
    """A tool as OpenAI's API describes it, with the small freedoms that real clients take."""
    short = d.chance(0.2)
    shape: dict = {"type": "object", "properties": {p.name: p.schema(short) for p in params}}
    required = [p.name for p in params if p.required]
    if required or d.chance(0.5):
        shape["required"] = required
    if d.chance(0.08):
        shape["additionalProperties"] = False
    function = (
        {"name": name, "parameters": shape}
        if not about
        else {"name": name, "description": about, "parameters": shape}
    )
    if d.chance(0.04):
        function["strict"] = True
    return {"type": "function", "function": function}


def schema_printer(d: Dice):
    """How this chat prints schemas: mostly plain JSON, now and then compact or with sorted keys, as other engines do."""
    x = d.r.random()
    if x < 0.86:
        return lambda t: json.dumps(t, ensure_ascii=False)
    if x < 0.93:
        return lambda t: json.dumps(t, ensure_ascii=False, separators=(",", ":"))
    return lambda t: json.dumps(t, ensure_ascii=False, sort_keys=True)


# ---------------------------------------------------------------- spelling
def styled(parts: list[str], style: int) -> str:
    """0 snake_case, 1 camelCase, 2 kebab-case, 3 PascalCase."""
    if style in (0, 2):
        return "_-"[style // 2].join(parts)
    tail = "".join(w.capitalize() for w in parts[style == 1 :])
    return parts[0] + tail if style == 1 else tail


def spoken(name: str) -> str:
    """user_id, userId -> user id."""
    return re.sub(r"[_-]", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).lower()


def lower_first(s: str) -> str:
    return s[:1].lower() + s[1:]


def upper_first(s: str) -> str:
    return s[:1].upper() + s[1:]


def listing(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def quoted(d: Dice, text: str, bare: float = 0.7) -> str:
    """Text as a user writes it: words mostly bare, several words mostly in quotes."""
    several = " " in text or "," in text
    if several and ("," in text or " and " in text or d.chance(0.8)):
        return f'"{text}"' if d.chance(0.75) or "'" in text else f"'{text}'"
    if not several and d.chance(1 - bare):
        mark = d.pick(['"', '"', "'", "`"])
        return text if mark in text else f"{mark}{text}{mark}"
    return text


def said(d: Dice, value: object) -> str:
    """Any argument as a user would write it."""
    if isinstance(value, str):
        return quoted(d, value)
    if isinstance(value, dict):
        return _said_object(d, value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if d.chance(0.25):
            return json.dumps(value, ensure_ascii=False)
        items = [_said_object(d, v) for v in value]
        return "; ".join(items) if d.chance(0.5) else ", ".join(f"({i})" for i in items)
    if isinstance(value, list):
        items = [quoted(d, v, 0.8) if isinstance(v, str) else json.dumps(v) for v in value]
        return ", ".join(items) if d.chance(0.4) else listing(items)
    return json.dumps(value)


def _said_object(d: Dice, value: dict) -> str:
    if d.chance(0.2):
        return json.dumps(value, ensure_ascii=False)
    sep = d.pick([" ", " ", ": ", "="])
    items = []
    for k, v in value.items():
        text = v if isinstance(v, str) else json.dumps(v)
        items.append(
            f"{spoken(k)}{sep}"
            + (f'"{text}"' if isinstance(v, str) and (" " in text or d.chance(0.2)) else text)
        )
    return ", ".join(items) if d.chance(0.6) else listing(items)
