"""Forms of answers: what a mask lets through has the form, and nothing that has it is kept out."""

from __future__ import annotations

import json
import random
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from freetoken.chat import parsers
from freetoken.chat.codec import ChatCodec, Prompt
from freetoken.chat.constraint import ConstraintMaker, TokenConstraint, bits, has_bit
from freetoken.chat.conversation import AnswerFormat, Conversation, Message, Tool
from freetoken.chat.stream_parser import parse_whole
from freetoken.core import choices
from freetoken.core.errors import RequestError
from freetoken.engine.build import DEMO_MODEL

FORMATS = ("qwen_json", "qwen_xml")
WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        },
        "required": ["city", "days", "unit"],
        "$defs": {"tag": {"type": "object", "properties": {"t": {"type": "boolean"}}, "required": ["t"]}},
        "additionalProperties": False,
    },
)
TOOLS = (WEATHER, Tool("now"))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def makers() -> dict[str, ConstraintMaker]:
    codecs = {name: ChatCodec.from_directory(DEMO_MODEL, name) for name in FORMATS}
    return {name: ConstraintMaker(codec, codec.tokenizer.vocab_size) for name, codec in codecs.items()}


def codec_of(maker: ConstraintMaker) -> ChatCodec:
    return maker._codec


def prompt(codec: ChatCodec, *, in_thinking: bool = False) -> Prompt:
    return Prompt(np.zeros(1, np.int32), (), (), in_thinking, codec.stop_ids, None, "")


def made(maker: ConstraintMaker, conversation: Conversation, *, in_thinking: bool = False) -> TokenConstraint:
    found = maker.make(conversation, prompt(codec_of(maker), in_thinking=in_thinking), may_think=in_thinking)
    assert found is not None
    return found


def ask(*tools: Tool, **more: Any) -> Conversation:
    return Conversation((Message("user", "Hi"),), tools, **more)


def by(kind: str, value: Any) -> AnswerFormat:
    return AnswerFormat(kind, value)  # type: ignore[arg-type]


def refused_at(maker: ConstraintMaker, constraint: TokenConstraint, text: str) -> str | None:
    """Feed a text; return the piece that the mask refused, None if all passed and the end may come."""
    codec = codec_of(maker)
    for id_ in codec.tokenizer.encode(text):
        if not has_bit(constraint.mask(), int(id_)):
            return codec.tokenizer.decode([int(id_)], skip_special=False)
        assert constraint.advance(int(id_))
    return None if has_bit(constraint.mask(), codec.stop_ids[0]) else "the end"


def drawn(maker: ConstraintMaker, constraint: TokenConstraint, seed: int, most: int = 300) -> str:
    """An answer drawn blindly from short tokens that the masks allow, with a liking for closing things."""
    rng, codec, ids = random.Random(seed), codec_of(maker), []
    closings = [codec.tokenizer.encode(text).tolist() for text in ("\n</parameter>\n", '"', "}", "]")]
    queue: list[int] = []
    while len(ids) < most:
        mask = constraint.mask()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:600])
        if has_bit(mask, codec.stop_ids[0]):
            return codec.tokenizer.decode(ids, skip_special=False)
        if not queue and rng.random() < 0.4:
            queue = list(rng.choice(closings))
        if not queue or not has_bit(mask, queue[0]):
            words = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            queue = [int(rng.choice(allowed if len(allowed) else words))]
        ids.append(queue.pop(0))
        assert constraint.advance(ids[-1])
    raise AssertionError(f"no end in {most} tokens: {codec.tokenizer.decode(ids, skip_special=False)!r}")


@pytest.mark.parametrize(
    ("wished", "good", "bad"),
    [
        (by("json_schema", PERSON), '{"name": "Ann\u00e9", "age": -3}', '{"age": 3}'),
        (
            by("json_schema", PERSON),
            '{\n  "name": "A",\n  "age": 1\n}',
            '{"name": "much too long", "age": 1}',
        ),
        (by("json_schema", {"type": "object"}), '{"any": [1, {"x": null}]}', "[1]"),
        (by("regex", "[a-c/]{2,4}-\\d"), "a/b-7", "abcab-7"),
        (by("choice", ["yes", "no"]), "no", "maybe"),
        (by("grammar", 'start: "x" /[0-9]/'), "x7", "xx"),
        (by("grammar", 'root ::= "a" root | "b"'), "aaab", "ac"),
    ],
)
def test_a_form_lets_through_what_has_it_and_nothing_else(makers, wished, good, bad):
    maker = makers["qwen_xml"]
    assert refused_at(maker, made(maker, ask(answer_format=wished)), good) is None
    assert refused_at(maker, made(maker, ask(answer_format=wished)), bad) is not None


@pytest.mark.parametrize(
    "wished",
    [
        by("choice", ["</think>"]),
        by("choice", ["<|im_end|>"]),
        by("regex", "a<\\/think>b"),
        by("json_schema", {"const": "<tool_call>"}),
    ],
    ids=str,
)
def test_the_text_of_a_control_token_is_written_in_plain_pieces(makers, wished):
    maker = makers["qwen_xml"]
    codec, constraint = codec_of(maker), made(maker, ask(answer_format=wished))
    control, ids = {token.id for token in codec.tokenizer.added}, []
    while True:
        allowed = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        if ids and codec.stop_ids[0] in allowed:
            break
        ids.append(int(next(i for i in allowed if i not in control)))
        assert constraint.advance(ids[-1])
    text = codec.tokenizer.decode(ids)
    assert text.strip('"') in ("</think>", "<|im_end|>", "a</think>b", "<tool_call>")


@pytest.mark.parametrize("seed", range(8))
def test_what_is_drawn_blindly_under_a_schema_validates(makers, seed):
    maker = makers["qwen_json"]
    value = json.loads(drawn(maker, made(maker, ask(answer_format=by("json_schema", PERSON))), seed))
    assert set(value) == {"name", "age"} and isinstance(value["age"], int) and len(value["name"]) <= 8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_a_call_drawn_blindly_reads_as_one_whole_call_of_the_named_tool(makers, name, seed):
    maker, module = makers[name], choices.load(parsers.__name__, name)
    answer = read(
        module, drawn(maker, made(maker, ask(*TOOLS, tool_choice="named", forced_tool="get_weather")), seed)
    )
    assert answer.content == "" and [call.name for call in answer.tool_calls] == ["get_weather"]
    arguments = json.loads(answer.tool_calls[0].arguments)
    assert {"city", "days", "unit"} <= set(arguments) <= {"city", "days", "unit", "tags"}
    assert (
        isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 9 and arguments["unit"] in ("C", "F")
    )
    assert all(isinstance(tag["t"], bool) for tag in arguments.get("tags", []))


def read(module: ModuleType, text: str) -> Any:
    return parse_whole(module.GRAMMAR, text, TOOLS)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_writes_is_what_its_rule_allows(makers, name):
    maker, module = makers[name], choices.load(parsers.__name__, name)
    arguments = {"city": 'Lis "b" <on>\n\nx', "days": 3, "unit": "C", "tags": [{"t": True}]}
    one = module.write_call("get_weather", arguments)
    both = f"{one}\n{module.write_call('now', {})}"
    for wished, text, fits in [
        ({"tool_choice": "required"}, both, True),
        ({"tool_choice": "required"}, "Some text.", False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, both, False),
        ({"tool_choice": "named", "forced_tool": "get_weather"}, one, True),
        ({"tool_choice": "named", "forced_tool": "now"}, one, False),
        ({"answer_format": by("choice", ["yes"])}, one, True),
        ({"answer_format": by("choice", ["yes"])}, "yes", True),
        ({"answer_format": by("choice", ["yes"]), "tool_choice": "none"}, one, False),
    ]:
        constraint = made(maker, ask(*TOOLS, **wished))
        assert (refused_at(maker, constraint, text) is None) == fits, (wished, text)


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_bind_calls_and_leave_text_free(makers, name):
    maker, module = makers[name], choices.load(parsers.__name__, name)
    strict = Tool(WEATHER.name, "", WEATHER.parameters, strict=True)
    good = {"city": "Oslo", "days": 2, "unit": "F"}
    call = module.write_call("get_weather", good)
    for text, fits in [
        ("Just words.\n", True),
        (f"I look.\n\n{call}", True),
        (f"{call}\n{call}\nAnd so on.", True),
        (module.write_call("get_weather", {**good, "days": 12}), False),
        (module.write_call("get_weather", {"city": "Oslo"}), False),
        (module.write_call("unknown", good), False),
    ]:
        assert (refused_at(maker, made(maker, ask(strict)), text) is None) == fits, text
    assert maker.make(ask(WEATHER), prompt(codec_of(maker)), may_think=False) is None


def test_a_form_begins_after_the_thought(makers):
    maker = makers["qwen_xml"]
    wished = ask(answer_format=by("choice", ["yes"]))
    assert refused_at(maker, made(maker, wished, in_thinking=True), "So { be it.\n</think>\n\nyes") is None
    assert refused_at(maker, made(maker, wished, in_thinking=True), "So be it.\n</think>\n\nno") is not None
    assert refused_at(maker, made(maker, wished, in_thinking=True), "So be it.") == "the end"
    assert refused_at(maker, made(maker, wished), "\n\nyes") is not None


def test_an_answer_may_open_its_own_thought_unless_thinking_is_off(makers):
    maker = makers["qwen_xml"]
    wished = ask(answer_format=by("choice", ["yes"]))
    for may_think in (True, False):
        constraint = maker.make(wished, prompt(codec_of(maker)), may_think=may_think)
        fits = refused_at(maker, constraint, "<think>\nHm.\n</think>\n\nyes") is None
        assert fits == may_think


@pytest.mark.parametrize(
    "wished",
    [
        by("regex", "("),
        by("json_schema", {"type": "objekt"}),
        by("json_schema", {"type": "string", "pattern": "("}),
        by("json_schema", {"type": "string", "format": "made-up"}),
        by("json_schema", {"not": {"type": "string"}}),
        by("json_schema", {"$ref": "#/$defs/none"}),
        by("json_schema", {"type": "string", "enum": ["x" * 1000 + str(i) for i in range(600)]}),
        by("grammar", "start: nothing"),
        by("grammar", "root ="),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_admission(makers, wished):
    with pytest.raises(RequestError) as caught:
        made(makers["qwen_xml"], ask(answer_format=wished))
    assert caught.value.code == "invalid_grammar" and caught.value.param == "response_format"


def test_odd_words_in_the_schema_of_a_tool_that_is_not_strict_are_no_reason_to_refuse(makers):
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}})
    maker = makers["qwen_json"]
    assert made(maker, ask(odd, tool_choice="required"))
    with pytest.raises(RequestError):
        made(maker, ask(Tool("odd", "", odd.parameters, strict=True), tool_choice="required"))


def test_a_format_without_calls_refuses_forced_ones():
    maker = ConstraintMaker(ChatCodec.from_directory(DEMO_MODEL, "plain"), 8192)
    with pytest.raises(RequestError) as caught:
        made(maker, ask(*TOOLS, tool_choice="required"))
    assert caught.value.code == "unsupported_tool_choice"


def test_masks_hold_exactly_their_bits():
    mask = bits([0, 31, 32, 99], 100)
    assert mask.dtype == np.int32 and len(mask) == 4
    assert [i for i in range(128) if has_bit(mask, i)] == [0, 31, 32, 99]


def test_a_mask_takes_far_less_than_a_step(makers):
    maker = makers["qwen_xml"]
    constraint = made(maker, ask(answer_format=by("json_schema", PERSON)))
    took = []
    for id_ in codec_of(maker).tokenizer.encode('{"name": "Anna", "age": 33}'):
        start = time.perf_counter()
        constraint.mask()
        took.append(time.perf_counter() - start)
        constraint.advance(int(id_))
    assert sorted(took)[len(took) // 2] < 2e-3
