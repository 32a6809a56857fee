"""The parser axis: any cut of the stream gives the answer that one shot gives."""

from __future__ import annotations

import itertools
import json
import random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat import parsers
from freetoken.chat.events import Answer, Event, fold
from freetoken.chat.parsers._example import Example
from freetoken.chat.stream_parser import StreamParser
from freetoken.core import choices

MODULES = [choices.load(parsers.__name__, name) for name in parsers.names()]
SPECIMENS = [(module, example) for module in MODULES for example in module.EXAMPLES]
IDS = [f"{m.__name__.rsplit('.', 1)[-1]}-{i}" for m in MODULES for i in range(len(m.EXAMPLES))]


def stream(module: ModuleType, pieces: list[str], example: Example, **options: object) -> list[Event]:
    ids = (f"call_{i}" for i in itertools.count())
    parser = StreamParser(
        module.GRAMMAR,
        tools=example.tools,
        in_thinking=example.in_thinking,
        new_id=lambda: next(ids),
        **options,  # type: ignore[arg-type]
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def seen(answer: Answer) -> tuple[object, ...]:
    return answer.content, answer.reasoning, answer.tool_calls


@pytest.mark.parametrize(("module", "example"), SPECIMENS, ids=IDS)
def test_a_whole_answer_reads_as_its_example_says(module: ModuleType, example: Example) -> None:
    answer = module.parse(example.text, example.tools, in_thinking=example.in_thinking)
    assert answer.content == example.content
    assert answer.reasoning == example.reasoning
    calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert calls == [(name, dict(arguments)) for name, arguments in example.calls]
    assert all(call.complete for call in answer.tool_calls)


@pytest.mark.parametrize(("module", "example"), SPECIMENS, ids=IDS)
def test_every_cut_of_an_example_equals_one_shot(module: ModuleType, example: Example) -> None:
    text = example.text
    whole = seen(fold(stream(module, [text], example)))
    for size in (1, 2, 3):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert seen(fold(stream(module, pieces, example))) == whole
    for cut in range(len(text) + 1):
        assert seen(fold(stream(module, [text[:cut], text[cut:]], example))) == whole


FRAGMENTS = st.sampled_from(
    [
        *'<>/\n {}[]",:=ab1\\',
        *["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>"],
        *[
            "</function>",
            "f",
            "f>",
            "\n\n",
            "<tool",
            "_call>",
            '{"name": "f", "arguments": {',
            '"a": 1',
            "}}",
        ],
        *[
            "<|start|>",
            "assistant",
            "<|channel|>",
            "analysis",
            "final",
            "commentary",
            "<|message|>",
            "<|end|>",
        ],
        *[
            " to=functions.f",
            " <|constrain|>json",
            "<|call|>",
            "<|channel|>final<|message|>",
            '{"a": "<|end|>"}',
        ],
        *["<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "true", "stop", "word ", "\U0001f469"],
    ]
)


@pytest.mark.parametrize("module", MODULES, ids=parsers.names())
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_cut_anyhow_equals_one_shot(module: ModuleType, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    stops = data.draw(st.lists(st.sampled_from(["stop", "\n\n", "a<", "<t", "</think>x", "}}"]), max_size=2))
    tools = module.EXAMPLES[-1].tools
    example = Example(text, tools=tools, in_thinking=data.draw(st.booleans()))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = fold(stream(module, [text], example, stop=stops))
    assert seen(fold(stream(module, pieces, example, stop=stops))) == seen(whole)
    assert seen(fold(stream(module, list(text), example, stop=stops))) == seen(whole)
    for call in whole.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("module", MODULES, ids=parsers.names())
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="<>/think tool_call\n", max_size=60))
def test_without_markers_nothing_of_the_text_is_lost(module: ModuleType, text: str) -> None:
    if "<think>" in text or "<tool_call>" in text:
        return
    answer = module.parse(text)
    assert answer.content == text


@pytest.mark.soak
@pytest.mark.parametrize("module", MODULES, ids=parsers.names())
def test_ten_thousand_mutated_examples_never_raise_and_read_alike_in_pieces(module: ModuleType) -> None:
    rng = random.Random(7)
    for _ in range(10_000):
        example = rng.choice(module.EXAMPLES)
        text = example.text
        for _ in range(rng.randint(1, 4)):
            at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
            text = rng.choice(
                [text[:at] + text[end:], text[:at] + text[at:end] * 2 + text[end:], text[end:] + text[:at]]
            )
        mutated = Example(text, tools=example.tools, in_thinking=example.in_thinking)
        cut = rng.randint(0, len(text))
        whole = fold(stream(module, [text], mutated))
        assert seen(fold(stream(module, [text[:cut], text[cut:]], mutated))) == seen(whole)
        if not whole.tool_calls:
            said = "".join((whole.content + whole.reasoning).split())
            markers = {marker for state in module.GRAMMAR.states.values() for marker in state.rules}
            markers = sum(text.count(marker) * len(marker) for marker in markers)
            # Half a header at the end is dropped as well.
            assert len(said) >= len("".join(text.split())) - markers - 14, "text was lost"
