"""The form of an answer as requests wish it, in every spelling, brought to one AnswerFormat.

Knows shapes only: whether a schema or grammar can be enforced is found out when the request is
admitted. More than one wish in a request is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.chat.conversation import AnswerFormat
from freetoken.core.errors import RequestError

_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED = {f"guided_{name}": kind for name, kind in _STRUCTURED.items()}


def read_format(wished: Mapping[str, Any] | None, where: str) -> AnswerFormat | None:
    """`{"type": "text" | "json_object" | "json_schema", ...}`, the schema nested or beside the type."""
    kind = (wished or {}).get("type", "text")
    if wished is None or kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat("json_schema", {"type": "object"}, where)
    if kind != "json_schema":
        raise RequestError(
            f"{where} of type {kind!r} is not supported.",
            code="unsupported_response_format",
            hint="Use text, json_object or json_schema.",
            param=where,
        )
    nested = wished.get("json_schema")
    schema = (nested if isinstance(nested, Mapping) else wished).get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{where} holds no schema.",
            code="missing_field",
            hint="Send the JSON schema of the answer in `schema`.",
            param=where,
        )
    return AnswerFormat("json_schema", schema, where)


def read_extensions(fields: Mapping[str, Any]) -> list[AnswerFormat]:
    """Wishes in fields that other local servers have: structured_outputs, guided_*, grammar, json_schema.

    fields  name -> value as it came; null values are none
    """
    found = []
    for name, value in fields.items():
        if value is None:
            continue
        if name == "structured_outputs":
            if not isinstance(value, Mapping):
                raise _wrong(name, "an object")
            inner = {f"guided_{key}": v for key, v in value.items() if key in _STRUCTURED}
            found += read_extensions(inner)
        else:
            kinds = {**_GUIDED, "grammar": "grammar", "json_schema": "json_schema"}
            found.append(_checked(kinds[name], value, name))
    return found


def only_one(*wishes: AnswerFormat | None) -> AnswerFormat | None:
    """The one wish there is; RequestError if there are several."""
    found = [wish for wish in wishes if wish is not None]
    if len(found) > 1:
        raise RequestError(
            f"{found[0].where} and {found[1].where} both wish a form of the answer.",
            code="unsupported_response_format",
            hint="Send one of them.",
            param=found[1].where,
        )
    return found[0] if found else None


def _checked(kind: str, value: Any, name: str) -> AnswerFormat:
    if kind == "json_schema":
        if not isinstance(value, Mapping):
            raise _wrong(name, "a JSON schema as an object")
        return AnswerFormat("json_schema", value, name)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise _wrong(name, "a list of texts")
        return AnswerFormat("choice", value, name)
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    if kind == "regex":
        return AnswerFormat("regex", value, name)
    return AnswerFormat("grammar", value, name)


def _wrong(name: str, wanted: str) -> RequestError:
    return RequestError(
        f"{name} must be {wanted}.", code="invalid_type", hint="Change it or leave it out.", param=name
    )
