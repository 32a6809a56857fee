"""Text survives the way through ids, whole and token by token."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat.inert import InertText
from freetoken.chat.tokenizer import Tokenizer
from freetoken.core.errors import WeightsError

BYTES = {name: Tokenizer(make()) for name, make in vocabularies.BYTES.items()}
ALL = {name: Tokenizer(make()) for name, make in vocabularies.ALL.items()}
EMOJI = "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1f5\U0001f1f9 \u2764\ufe0f"
HANGUL, HEBREW = "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab", "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd"
SCRIPTS = f"{HANGUL} {HEBREW} {EMOJI} na\u00efve \u4f60\u597d\n"


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    return [*(detokenizer.feed([id_]) for id_ in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", BYTES)
def test_scripts_and_emoji_stream_token_by_token(name: str) -> None:
    tokenizer = BYTES[name]
    pieces = streamed(tokenizer, tokenizer.encode(SCRIPTS).tolist())
    assert "".join(pieces) == SCRIPTS
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", BYTES)
def test_every_kind_of_code_point_streams_unharmed(name: str) -> None:
    """One, two, three and four bytes: the ends of each range, and steps in between."""
    points = [
        *range(0x20, 0x7F),
        *range(0x80, 0x800, 5),
        *range(0x800, 0xD800, 211),
        *range(0xE000, 0x10000, 97),
    ]
    points += [0x7FF, 0xFFFF, *range(0x10000, 0x110000, 4099), 0x10FFFF]
    text = "x" + "".join(map(chr, points))
    tokenizer = BYTES[name]
    assert "".join(streamed(tokenizer, tokenizer.encode(text).tolist())) == text


@pytest.mark.parametrize("name", BYTES)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back_whole_and_streamed(name: str, text: str) -> None:
    tokenizer = BYTES[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert "".join(streamed(tokenizer, ids.tolist(), skip_special=False)) == text


@pytest.mark.parametrize("name", ALL)
def test_decoding_equals_the_librarys(name: str) -> None:
    tokenizer = ALL[name]
    for text in ("hi", "hi there", " hi", "hi hi, walking walks!", "hi <|im_end|> hi", "a  b"):
        ids = tokenizer.encode(text).tolist()
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_stream_as_utf8_reads_them(data: list[int]) -> None:
    """Invalid bytes become U+FFFD at once, never stall, and never swallow what is valid."""
    tokenizer = BYTES["byte level"]
    by_byte = {tokenizer.token_bytes(id_): id_ for id_ in range(256)}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert "".join(streamed(tokenizer, ids)) == bytes(data).decode(errors="replace")


def test_half_a_character_waits_and_is_replaced_at_the_end_only() -> None:
    tokenizer = BYTES["byte level"]
    ids = tokenizer.encode("a\U0001f469").tolist()
    assert streamed(tokenizer, ids) == ["a", "", "", "", "\U0001f469", ""]
    assert streamed(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]
    assert streamed(tokenizer, [*ids[:-1], *tokenizer.encode("b")])[-2:] == ["\ufffdb", ""]


def test_special_tokens_are_hidden_unless_kept() -> None:
    tokenizer = BYTES["demo"]
    ids = tokenizer.encode("<think>a</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think>"
    assert tokenizer.decode(ids, skip_special=False) == "<think>a</think><|im_end|>"
    kept = tokenizer.detokenizer(keep=[8185])
    assert kept.feed(ids) == "<think>a</think><|im_end|>"


def test_ids_outside_the_vocabulary_are_silent() -> None:
    for tokenizer in BYTES.values():
        assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


def test_a_raw_prompt_gets_one_bos_however_it_is_written() -> None:
    tokenizer = BYTES["byte fallback"]
    for text in ("hi", "<s>hi"):
        ids = tokenizer.encode(text, add_special=True).tolist()
        assert ids[0] == 1 and ids.count(1) == 1
    assert 1 not in tokenizer.encode("hi").tolist()
    assert BYTES["demo"].encode("hi", add_special=True).tolist() == BYTES["demo"].encode("hi").tolist()


def test_lone_surrogates_become_replacement_characters() -> None:
    tokenizer = BYTES["byte level"]
    assert tokenizer.decode(tokenizer.encode("a\ud83d b \ud83d\ude00")) == "a\ufffd b \U0001f600"


def test_ids_are_int32() -> None:
    assert ALL["demo"].encode("Hello").dtype == "int32" and ALL["demo"].encode("").shape == (0,)


def test_the_demo_model_names_its_ends() -> None:
    tokenizer = Tokenizer.from_directory(vocabularies.DEMO)
    assert tokenizer.eos_ids == (8185, 8183)
    assert {token.text for token in tokenizer.added if token.special} == {
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    }


def test_eos_ids_come_from_all_of_their_places(tmp_path: Path) -> None:
    vocabularies.byte_fallback().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == (7, 5, 2)


def test_a_missing_or_damaged_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as missing:
        Tokenizer.from_directory(tmp_path)
    assert missing.value.code == "missing_tokenizer" and missing.value.hint
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError) as damaged:
        Tokenizer.from_directory(tmp_path)
    assert damaged.value.code == "invalid_tokenizer" and damaged.value.hint


def test_a_tokenizers_truncation_is_switched_off(tmp_path: Path) -> None:
    made: tokenizers.Tokenizer = vocabularies.byte_level()
    made.enable_truncation(4)
    made.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("much longer")) > 4


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("tokenizer_config.json", "{", "invalid_json"),
        ("generation_config.json", '{"eos_token_id": "x"}', "invalid_model_config"),
    ],
)
def test_a_damaged_file_beside_the_tokenizer_is_named(
    file: str, text: str, code: str, tmp_path: Path
) -> None:
    tokenizer = vocabularies.BYTES[next(iter(vocabularies.BYTES))]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(text)
    with pytest.raises(WeightsError) as e:
        Tokenizer.from_directory(tmp_path)
    assert e.value.code == code and file in e.value.message


@pytest.mark.parametrize("control", [False, True], ids=["plain", "quoting control text"])
def test_a_long_text_lets_other_threads_run(control: bool) -> None:
    """A server's streams go on while somebody's prompt of some megabytes is tokenised."""
    tokenizer = Tokenizer.from_directory(vocabularies.DEMO)
    inert = InertText(tokenizer, ["<|im_end|>"])
    text = ("hello <|im_end|>" if control else "hello world ") * 60_000
    broken = inert.break_up(text)
    inert.encode(inert.break_up("<|im_end|>"))  # what is made once is made
    turns, work = 0, threading.Thread(target=inert.encode, args=(broken,))
    work.start()
    while work.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 20
