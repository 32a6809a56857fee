"""Tokenizers and templates out of GGUF metadata: the same ids as the tokenizer.json they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freetoken.chat.codec import ChatCodec
from freetoken.chat.gguf_vocabulary import SPLITS, template_of, tokenizer_of
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core.errors import WeightsError
from tests.chat import vocabularies

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def header(backend: tokenizers.Tokenizer, **more: Any) -> dict[str, Any]:
    """What a converter would write for a BPE tokenizer."""
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [
        (CONTROL if added[i].special else USER) if i in added else BYTE if _is_byte(t) else NORMAL
        for i, t in enumerate(tokens)
    ]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    out: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model["byte_fallback"]:
        ranks = {"".join(m): float(-i) for i, m in reversed(list(enumerate(merges)))}
        out |= {"model": "llama", "scores": [ranks.get(t, -1e6) for t in tokens]}
        out |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    else:
        out |= {"model": "gpt2", "pre": "gpt-2", "merges": [" ".join(m) for m in merges]}
    return {f"tokenizer.ggml.{key}": value for key, value in (out | more).items() if value is not None}


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")


MAKERS = {"byte level": vocabularies.byte_level, "byte fallback": vocabularies.byte_fallback}
PAIRS = {name: (Tokenizer(make()), tokenizer_of(header(make()))) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(text=st.text(max_size=30))
@example(text="hi him <|im_start|>hi 12345 <think>\n\n é 你好 \t<0x41>▁")
@example(text="  two leading spaces")
def test_any_text_becomes_the_same_ids_and_comes_back(name: str, text: str) -> None:
    theirs, ours = PAIRS[name]
    assert ours.encode(text).tolist() == theirs.encode(text).tolist()
    assert ours.encode(text, add_special=True).tolist() == theirs.encode(text, add_special=True).tolist()
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False)
    assert ours.decode(ids) == theirs.decode(ids)


def test_special_tokens_stay_special() -> None:
    for theirs, ours in PAIRS.values():
        assert ours.added == theirs.added and ours.special_ids == theirs.special_ids
    assert PAIRS["byte fallback"][1].eos_ids == (2,)


TEXT = "I'LL see 12345x  Ünïted\n\n  it's/\n e\u0301a"
WORDS = {
    "gpt-2": "I|'|LL| see| 12345|x| | Ünïted|\n\n | it|'s|/|\n| e|\u0301|a",
    "smollm": "I|'|LL| see| |1|2|3|4|5|x| | Ünïted|\n\n | it|'s|/|\n| e|\u0301|a",
    "llama-bpe": "I|'LL| see| |123|45|x| | Ünïted|\n\n| | it|'s|/\n| e|\u0301a",
    "qwen2": "I|'LL| see| |1|2|3|4|5|x| | Ünïted|\n\n| | it|'s|/\n| éa",
    "qwen35": "I|'LL| see| |1|2|3|4|5|x| | Ünïted|\n\n| | it|'s|/\n| éa",
    "gpt-4o": "I'LL| see| |123|45|x| | Ünïted|\n\n| | it's|/\n| e\u0301a",
    "tekken": "I|'LL| see| |1|2|3|4|5|x| | Ünïted|\n\n| | it|'s|/\n| e\u0301a",
}


def words(pre: str, text: str) -> list[str]:
    backend = tokenizer_of(header(vocabularies.byte_level(), pre=pre)).backend
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert backend.pre_tokenizer is not None
    return [normal[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(normal)]


@pytest.mark.parametrize("pre", WORDS)
def test_each_splitting_cuts_as_its_models_were_trained(pre: str) -> None:
    assert words(pre, TEXT) == WORDS[pre].split("|")


def test_every_splitting_has_its_words() -> None:
    same = {"starcoder": "smollm", "refact": "smollm", "llama3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
    assert set(SPLITS) <= set(WORDS) | set(same)
    for alias, name in same.items():
        assert words(alias, TEXT) == words(name, TEXT)


def test_a_word_that_is_a_token_needs_no_merges() -> None:
    made = vocabularies.byte_level()
    made.add_tokens(["xyz"])
    tokens = header(made, token_type=[NORMAL] * made.get_vocab_size())
    whole = tokenizer_of(tokens | {"tokenizer.ggml.pre": "llama-bpe"}).encode("xyz")
    parts = tokenizer_of(tokens | {"tokenizer.ggml.pre": "qwen2"}).encode("xyz")
    assert len(whole) == 1 and len(parts) == 3


def test_what_surrounds_plain_text_is_the_headers_choice() -> None:
    made = vocabularies.byte_level()
    im_start = made.token_to_id("<|im_start|>")
    for adds, want in ((True, [im_start]), (False, []), (None, [])):
        ours = tokenizer_of(header(made, add_bos_token=adds, bos_token_id=im_start))
        assert ours.encode("", add_special=True).tolist() == want
    bare = tokenizer_of(header(vocabularies.byte_fallback(), add_space_prefix=False, add_bos_token=False))
    assert bare.decode(bare.encode("hi")) == "hi" and bare.decode(bare.encode(" hi")) == " hi"
    assert len(bare.encode("hi", add_special=True)) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"model": "bert"}, "bert"),
    "another splitting": ({"pre": "kimi-k2"}, "kimi-k2"),
    "no splitting": ({"pre": None}, "default"),
    "no tokens": ({"tokens": None}, "tokens"),
    "no merges": ({"merges": None}, "merges"),
    "types missing": ({"token_type": [1]}, "types"),
    "tokens twice": ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
    "merges of nothing": ({"merges": ["no such"]}, "no tokenizer"),
    "merges of one": ({"merges": ["one"]}, "no tokenizer"),
    "tokens that are numbers": ({"tokens": 5}, "int"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_vocabulary_that_is_not_understood_is_refused_by_name(what: str) -> None:
    change, word = REFUSED[what]
    with pytest.raises(WeightsError) as caught:
        tokenizer_of(header(vocabularies.byte_level(), **change))
    assert caught.value.code in ("invalid_tokenizer", "missing_tokenizer") and caught.value.hint
    assert word in caught.value.message


def with_template(text: str, **named: str) -> Mapping[str, Any]:
    more = {f"tokenizer.chat_template.{name}": value for name, value in named.items()}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 10**9}
    return {**header(vocabularies.byte_level(), **ids), "tokenizer.chat_template": text, **more}


def test_templates_and_the_tokens_they_speak_of_come_from_the_header() -> None:
    template = template_of(
        with_template("{{ bos_token }}{{ messages[0].content }}{{ pad_token }}", tool_use="T")
    )
    assert template is not None
    first = vocabularies.byte_level().id_to_token(0)
    assert template.render([{"role": "user", "content": "hi"}]) == f"{first}hi"
    assert template.render([{"role": "user", "content": "hi"}], [{"type": "function"}]) == "T"
    assert template_of(header(vocabularies.byte_level())) is None


def test_a_codec_stands_on_a_header_alone() -> None:
    chatml = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made = vocabularies.byte_level()
    codec = ChatCodec.from_gguf({**header(made), "tokenizer.chat_template": chatml})
    assert codec.stop_ids == (made.token_to_id("<|im_end|>"),)
