"""Types a parameter that arrived as raw text by the tool's JSON schema.

Rule: a string stays as it is, to the character; any other declared type is read as JSON (and as the
words that Python writes for true, false and null); what doesn't parse stays a string. A parameter
without a declared type is JSON if it parses, else a string. Pure; knows no format and no events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_DEPTH = 8


def accepted_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it doesn't say.

    schema  a parameter's schema, None if the parameter is not declared
    root    the whole schema, for references into it
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, (list, tuple)):
        return frozenset(map(str, kind))
    if isinstance(reference := schema.get("$ref"), str):
        return accepted_types(_follow(reference, root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(word), (list, tuple)):
            return frozenset().union(*(accepted_types(choice, root, depth + 1) for choice in choices))
    values = schema["enum"] if isinstance(schema.get("enum"), (list, tuple)) else []
    values = [*values, schema["const"]] if "const" in schema else values
    return frozenset(map(_type_of, values))


def value_json(raw: str, types: frozenset[str]) -> str:
    """Write a raw value as JSON text of one of the accepted types."""
    if types == {"string"}:
        return json.dumps(raw, ensure_ascii=False)
    text = raw.strip()
    if types and "string" not in types:
        text = _WORDS.get(text.lower(), text)
    try:
        value = json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    kinds = {_type_of(value)}
    kinds |= {"number"} if "integer" in kinds else set()
    if "string" in types and ("string" in kinds or not kinds & types):
        return json.dumps(raw, ensure_ascii=False)
    return text if _is_strict(text) else json.dumps(value, ensure_ascii=False)


def _is_strict(text: str) -> bool:
    """False if strings hold raw line ends or tabs, which models write and JSON forbids."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names[type(value)]


def _follow(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
