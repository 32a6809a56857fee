"""Every option is a flag of serve, chat and generate; the page about them is up to date."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from freetoken.cli import _options, _options_page
from freetoken.cli.main import PACKAGE, Parser
from freetoken.core import choices
from freetoken.core.options import Options

ROOT = Path(__file__).resolve().parents[2]


def parser_of(command: str) -> Parser:
    parser = Parser(f"ft {command}")
    choices.load(PACKAGE, command).add_arguments(parser)
    return parser


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_option_is_a_flag_with_help(command: str) -> None:
    parser = parser_of(command)
    helps = {flag: a.help for a in parser._actions for flag in a.option_strings}
    for f in fields(Options):
        assert helps[_options.flag(f.name)], f.name


def test_every_group_of_options_has_a_title() -> None:
    assert {f.metadata["group"] for f in fields(Options)} == set(_options.GROUPS)


def test_the_model_may_be_given_by_position() -> None:
    args = parser_of("serve").parse_args(["folder", "--port", "5"])
    assert _options.flag_values(args) == {"model": "folder", "port": 5}


def test_flags_without_meaning_are_options() -> None:
    assert set(_options.WITHOUT_MEANING) <= {f.name for f in fields(Options)}


def test_the_options_page_is_what_the_code_says() -> None:
    page = ROOT / "docs" / "options.md"
    assert page.read_text("utf-8") == _options_page.render(), "run: ft config page > docs/options.md"
