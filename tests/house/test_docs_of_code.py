"""Pages that restate the code: the table of error codes, the routes, the machine presets."""

from __future__ import annotations

import ast
import re

from house_source import ROOT, report, sources

from freetoken.core.machine import PRESETS
from freetoken.core.options import BACKENDS

CODE = re.compile(r"`([a-z][a-z0-9_]+)`")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def codes_in_the_code() -> dict[str, str]:
    """Every error code with the place that raises it."""
    found: dict[str, str] = {}
    for source in sources():
        for node in source.walk():
            if isinstance(node, ast.Call):
                values = [k.value for k in node.keywords if k.arg == "code"]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "default_code":
                values = [node.value]
            else:
                continue
            for value in values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.setdefault(value.value, source.at(node))
    return found


def codes_on_the_page() -> set[str]:
    tables = [line for line in page("errors.md").splitlines() if line.startswith("| `")]
    return {code for line in tables for code in CODE.findall(line.split("|")[1])}


def test_every_error_code_is_explained() -> None:
    known = codes_on_the_page()
    missing = [f"{code} ({where})" for code, where in codes_in_the_code().items() if code not in known]
    assert not missing, "not in docs/errors.md:" + report(missing)


def test_no_error_code_is_explained_that_nobody_raises() -> None:
    extra = sorted(codes_on_the_page() - set(codes_in_the_code()))
    assert not extra, "not in the code:" + report(extra)


def test_the_routes_of_the_api_are_on_its_page() -> None:
    app = next(s for s in sources() if s.name == "api/app.py")
    paths = set(re.findall(r'"(/[a-z0-9/]*)(?:\{[^"]*)?": self', app.text))
    text = page("api.md")
    assert paths and not [p for p in paths if f"`{p}" not in text and f" {p}" not in text]


def test_machines_and_backends_are_on_their_pages() -> None:
    assert not [name for name in PRESETS if f"`{name}`" not in page("devices.md")]
    assert not [name for name in BACKENDS if name not in page("experts.md") + page("plan.md")]
