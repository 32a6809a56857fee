# ruff: noqa: E501 - sentences and small makers read best on one line
"""The pure parts of the demo model's recipe: sources, chat format, generated chats, the pretend project, routing losses."""

import json
from functools import cache
from pathlib import Path

import jinja2
import pytest

from demo.chats.chat_format import TEMPLATE, prompt_end, render, to_openai
from demo.chats.coding import Session
from demo.chats.dice import Dice, load_lexicon
from demo.chats.sessions import MIXTURE, Chats, different
from demo.corpus.cleaning import held_out
from demo.corpus.sources import PACKAGES, PERMISSIVE, SOURCES

ROOT = Path(__file__).parents[2]
WORDS = load_lexicon(ROOT / "demo/evaluate/held_words.json.xz")


@pytest.fixture
def dice() -> Dice:
    return Dice(WORDS, seed=7, held=True)


@cache
def compiled() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def template(messages: list[dict], tools: list[dict] | None, **options: object) -> str:
    return compiled().render(messages=to_openai(messages), tools=tools, **options)


def test_every_source_is_permissive_and_named_in_the_card():
    card = (ROOT / "demo/CARD.md").read_text()
    for source in SOURCES:
        assert source.licence in PERMISSIVE
        assert (source.package or "CPython") in card, source.name
        assert source.licence in card, source.name


def test_no_source_comes_twice():
    assert len({s.name for s in SOURCES}) == len(SOURCES)
    assert len(set(PACKAGES)) == len(PACKAGES)


def test_training_text_equals_the_chat_template(dice):
    maker = Chats(dice)
    for _ in range(150):
        chat = maker.sample()
        assert template(chat.messages, chat.tools) == render(chat.messages, chat.tools)[0]


def test_a_prompt_equals_the_template_with_a_generation_prompt(dice):
    maker = Chats(dice)
    for _ in range(50):
        chat = maker.sample()
        last = max(i for i, m in enumerate(chat.messages) if m["role"] == "user") + 1
        asked = render(chat.messages[:last], chat.tools)[0] + prompt_end(chat.thinking)
        assert (
            template(
                chat.messages[:last], chat.tools, add_generation_prompt=True, enable_thinking=chat.thinking
            )
            == asked
        )


def test_every_call_names_an_offered_tool_and_only_its_parameters(dice):
    maker = Chats(dice)
    for _ in range(200):
        chat = maker.sample()
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in chat.tools or []}
        assert len(offered) == len(chat.tools or [])
        for name, args in (c for m in chat.messages for c in m.get("calls") or []):
            assert set(args) <= set(offered[name]["properties"])
            assert set(offered[name].get("required", [])) <= set(args)


def test_every_kind_of_chat_can_be_made(dice):
    maker = Chats(dice)
    for kind in MIXTURE:
        messages, _ = getattr(maker, f"_{kind}")(True)
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"


def test_learnt_spans_cover_exactly_what_the_assistant_writes(dice):
    for _ in range(40):
        chat = Chats(dice).sample()
        text, spans = render(chat.messages, chat.tools)
        assert sum(m["role"] == "assistant" for m in chat.messages) == sum(
            text[a:b].endswith("<|im_end|>") for a, b in spans
        )
        assert not any("<|im_start|>" in text[a:b] for a, b in spans)


def test_held_out_dice_draw_held_out_words_only(dice):
    assert all(held_out(dice.noun()) for _ in range(50))


def test_tools_of_one_request_cannot_serve_for_each_other(dice):
    for _ in range(60):
        kinds = [t.kind for t in different(dice, 3) if t.kind]
        assert len(kinds) == len(set(kinds))


def test_a_coding_session_solves_its_problem_in_the_pretend_project(dice):
    from demo.chats.bugs import problem

    for _ in range(40):
        session, p = Session(dice, thinking=False), problem(dice, 1)
        workspace = session.workspace(p)
        assert not workspace.solved
        for name, args in (c for m in session.solve(p) for c in m.get("calls") or []):
            answer = workspace.run(name, args)
            assert "Error" not in answer and "invalid call" not in answer
        assert workspace.solved


def test_a_wrong_edit_leaves_the_pretend_project_unsolved(dice):
    from demo.chats.bugs import bug

    p = next(filter(None, (bug(dice, 0) for _ in range(20))))
    session = Session(dice, thinking=False)
    while session.changer != "edit":
        session = Session(dice, thinking=False)
    workspace = session.workspace(p)
    assert "not found" in workspace.run(*session.box.call("edit", p.path, "no such text", "x"))
    assert not workspace.solved
