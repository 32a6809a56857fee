"""Raw values typed by a schema, and JSON read as it streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat.json_scan import JsonScan
from freetoken.chat.schema_value import accepted_types, value_json

ROOT = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, ' "42" \n', ' "42" \n'),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, " 42\n", 42),
        ({"type": "integer"}, "forty", "forty"),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '"q"', '"q"'),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "number"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"$ref": "#/$defs/loop"}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "x"}, "x", "x"),
        ({}, "3", 3),
        ({}, "True", "True"),
        (None, '{"a": 1}', {"a": 1}),
        (None, "plain words", "plain words"),
        (None, "9" * 5000, "9" * 5000),
    ],
)
def test_a_value_takes_the_type_of_its_schema(schema: object, raw: str, value: object) -> None:
    assert json.loads(value_json(raw, accepted_types(schema, ROOT))) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)


def scanned(text: str) -> str | None:
    scan, out = JsonScan(), ""
    for char in text:
        certain = scan.feed(char)
        if certain is None:
            return None
        out += certain
    return out if scan.ended else None


@settings(max_examples=200, deadline=None)
@given(value=OBJECTS, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_a_scanned_object_keeps_its_meaning(
    value: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    out = scanned(json.dumps(value, ensure_ascii=ascii_only, indent=indent))
    assert out is not None and json.loads(out) == value


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet='{}[]",:\\u0a1-.etrufalsn \n', max_size=30))
def test_whatever_scans_is_json(text: str) -> None:
    out = scanned("{" + text)
    if out is not None:
        assert isinstance(json.loads(out, strict=True), dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        ('{"a": "\\d \\u00e9 \\/"}', {"a": "\\d \u00e9 /"}),
        ('{"a": [1, 2,], "b": {"c": None,},}', {"a": [1, 2], "b": {"c": None}}),
        ('{"a": True, "b": False}', {"a": True, "b": False}),
        ('{"a": [], "b": {}}', {"a": [], "b": {}}),
    ],
)
def test_slips_that_keep_the_meaning_are_mended(text: str, value: object) -> None:
    out = scanned(text)
    assert out is not None and json.loads(out) == value


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '"a"',
        "{a: 1}",
        '{"a" 1}',
        '{"a": 01}',
        '{"a": 1 2}',
        '{"a": }',
        "{,}",
        '{"a": [,]}',
        '{"a": 1]',
        "{'a': 1}",
    ],
)
def test_what_is_no_object_fails(text: str) -> None:
    assert scanned(text) is None
