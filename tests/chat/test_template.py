"""Templates render to the text that the reference renders, or fail when it fails."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import templates_by_name as templates

from freetoken.chat.template import ChatTemplate
from freetoken.core.errors import RequestError, WeightsError

reference = pytest.importorskip("transformers.utils.chat_template_utils")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DEMO = Path(__file__).parents[2] / "freetoken" / "data" / "demo-model"
ALL = {**templates.ALL, "demo": (DEMO / "chat_template.jinja").read_text("utf-8")}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'later' \u5929\u6c14",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "\u57ce\u5e02"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
SYSTEM, USER = {"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi <b>&amp; '\"\n"}
ANSWER = {
    "role": "assistant",
    "content": "<think>\nhm\n</think>\n\n Hello \u4f60\u597d \U0001f469\u200d\U0001f4bb",
}
ARGUMENTS: dict[str, Any] = {
    "city": "<L>&'\"\u91cc\u65af\u672c\n",
    "days": [1, 2.5],
    "x": {"y": None, "z": True},
}


def called(arguments: object, content: object = "") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abc123def", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


RESULT = {
    "role": "tool",
    "content": '{"t": "21 \u00b0C <x>"}',
    "tool_call_id": "abc123def",
    "name": "get_weather",
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "thoughts": [USER, {**ANSWER, "content": "Hello", "reasoning_content": "hm\n"}, USER],
    "call": [USER, called(ARGUMENTS), RESULT],
    "call, raw text": [USER, called(json.dumps(ARGUMENTS))],
    "call, no content": [SYSTEM, USER, called({}, None), RESULT, ANSWER, USER],
    "two results": [USER, called(ARGUMENTS, "I look."), RESULT, RESULT, ANSWER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "late system": [USER, ANSWER, SYSTEM, USER],
    "null content": [USER, {"role": "assistant", "content": None}, USER],
    "nothing": [],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "add_generation_prompt": False},
    {"enable_thinking": False},
    {"tools": TOOLS, "enable_thinking": True, "reasoning_effort": "high", "date_string": "1 Jan"},
]


@functools.cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, SPECIAL)


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    generates = options.pop("add_generation_prompt", True)
    tools = options.pop("tools", None)
    try:
        return compiled(template).render(messages, tools, options, add_generation_prompt=generates)
    except RequestError as error:
        assert error.code == "template_error"
        return None


def render_reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    plain = reference._normalize_chat_messages(messages)
    options = {"add_generation_prompt": True, **SPECIAL, **options}
    try:
        return str(reference.render_jinja_template([plain], chat_template=template, **options)[0][0])
    except Exception:
        return None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_a_template_renders_as_the_reference_does(name: str, kind: str) -> None:
    messages = CONVERSATIONS[kind]
    aliased = reference._alias_reasoning_fields(messages)
    for options in OPTIONS:
        ours = render(ALL[name], aliased, **options)
        assert ours == render_reference(ALL[name], messages, **options)


def test_most_combinations_render_at_all() -> None:
    """So that agreeing on failure can't make the comparison empty."""
    rendered = [render(text, messages) for text in ALL.values() for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) > 0.7 * len(rendered)


def test_json_keeps_markup_and_scripts() -> None:
    text = ChatTemplate("{{ messages[0].content | tojson }}").render([{"content": "<a href='x'>&\u4f60</a>"}])
    assert text == "\"<a href='x'>&\u4f60</a>\""


def test_a_template_that_refuses_is_the_requests_error() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(RequestError, match="Roles must alternate") as caught:
        template.render([])
    assert (caught.value.code, caught.value.status) == ("template_error", 400)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_what_goes_wrong_inside_a_template_stays_inside(text: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(text).render([{"role": "user", "content": "x"}])


def test_variables_cannot_replace_what_is_rendered() -> None:
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate("x").render([], None, {"messages": []})


def test_a_template_that_does_not_compile_is_the_checkpoints_error() -> None:
    with pytest.raises(WeightsError) as caught:
        ChatTemplate("{% if %}")
    assert caught.value.code == "invalid_chat_template"


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m') }}", now=lambda: datetime.datetime(2024, 2, 29))
    assert template.render([]) == "2024-02"


def write(path: Path, **files: object) -> Path:
    for name, body in files.items():
        stem, _, ending = name.rpartition("_")
        text = body if isinstance(body, str) else json.dumps(body)
        (path / f"{stem}.{ending}").write_text(text, encoding="utf-8")
    return path


def test_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config_json={"chat_template": named, "bos_token": {"content": "<s>"}})
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None
    assert (found.render([]), found.render([], TOOLS)) == ("plain", "tools")
    write(tmp_path, chat_template_json={"chat_template": "json {{ bos_token }}"})
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None and found.render([]) == "json <s>"
    write(tmp_path, chat_template_jinja="jinja")
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None and found.render([]) == "jinja"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ messages }}", "invalid_chat_template"),
        ("tokenizer_config.json", b"[" * 100_000, "invalid_json"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "invalid_json"),
        ("chat_template.json", b"[1]", "invalid_json"),
        ("chat_template.json", b'{"chat_template": [1]}', "invalid_chat_template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "invalid_chat_template"),
    ],
)
def test_a_damaged_file_is_the_checkpoints_error(
    name: str, content: bytes, code: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        ChatTemplate.from_directory(tmp_path)
    assert caught.value.code == code and caught.value.hint


def test_a_special_token_without_a_text_is_none(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": "[{{ pad_token }}]", "pad_token": {"id": 1}})
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None and found.render([]) == "[]"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(write(tmp_path, tokenizer_config_json={})) is None
