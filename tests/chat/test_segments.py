"""Piece by piece, the ids are those of the whole; pieces seen before are not tokenised again."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inert import INERT, NAMES, TOKENIZERS
from tokenizers import pre_tokenizers

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.inert import InertText
from freetoken.chat.nonces import without_nonces
from freetoken.chat.segments import SegmentMemo, is_separable
from freetoken.chat.tokenizer import Tokenizer

PIECES = st.one_of(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n", " ", "  a", "7", "<|im", "|>"]
    ),
    st.text(max_size=6),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(PIECES, max_size=12).map("".join))
def test_pieces_give_the_ids_of_the_whole(name: str, text: str) -> None:
    text = text.replace("\ufdd0", "")
    assert INERT[name].encode(text).tolist() == TOKENIZERS[name].encode(text).tolist()


def test_a_tokenizer_that_marks_the_first_piece_only_is_not_taken_apart() -> None:
    backend = vocabularies.ALL["unigram"]()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(backend)
    control = [token.text for token in tokenizer.added]
    assert is_separable(TOKENIZERS["demo"], [token.text for token in TOKENIZERS["demo"].added])
    assert not is_separable(tokenizer, control)
    inert = InertText(tokenizer, frozenset(control))
    text = "hi<|im_end|>hi"
    assert inert.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_a_long_history_costs_only_what_is_new() -> None:
    inert = INERT["demo"]
    rng = np.random.default_rng(0)
    words = [f"word{i} " for i in range(500)]
    turns = ["<|im_start|>user\n" + "".join(rng.choice(words, 300)) + "<|im_end|>\n" for _ in range(200)]
    start = time.perf_counter()
    first = inert.encode("".join(turns))
    cold = time.perf_counter() - start
    before = inert.memo.num_misses
    start = time.perf_counter()
    again = inert.encode("".join(turns) + "<|im_start|>new")
    warm = time.perf_counter() - start
    assert len(first) > 60000 and again[: len(first)].tolist() == first.tolist()
    assert inert.memo.num_misses == before + 1
    assert warm < cold / 3


def test_what_is_remembered_stays_within_its_bound() -> None:
    memo, calls = SegmentMemo(max_bytes=5 * 400), []

    def encode(text: str) -> np.ndarray:
        calls.append(text)
        return np.array([len(text)], np.int32)

    for i in range(30):
        memo.encode(f"{i:020d}", False, encode)
        assert memo.num_bytes <= memo.max_bytes
    memo.encode("x" * 2000, False, encode)
    assert len(memo._ids) == 5 and len(calls) == 31, "what is larger than the bound displaces nothing"
    memo.encode(f"{29:020d}", False, encode)
    assert len(calls) == 31, "the newest pieces are kept"
    memo.encode(f"{29:020d}", True, encode)
    assert len(calls) == 32, "text that quotes control text is another piece"


def test_threads_share_a_memo() -> None:
    memo = SegmentMemo(max_bytes=4000)
    wrong = []

    def work(seed: int) -> None:
        for i in range(500):
            text = "x" * ((seed + i) % 20 + 1)
            if memo.encode(text, False, lambda t: np.array([len(t)], np.int32))[0] != len(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_lines_that_change_with_every_request_are_dropped() -> None:
    line = "x-anthropic-billing-header: cc_version=1.2.3.abc; cc_entrypoint=cli; cch=0a1b2;"
    turns = (Message("system", f"{line}\nBe brief."), Message("user", f"{line}\nWhat is this?"))
    assert without_nonces(turns) == (Message("system", "Be brief."), turns[1])
    assert without_nonces((Message("system", line), turns[1])) == (turns[1],)


def test_two_requests_that_differ_in_such_a_line_share_all_their_tokens() -> None:
    from pathlib import Path

    import freetoken
    from freetoken.chat.codec import ChatCodec

    path = Path(freetoken.__file__).parent / "data" / "demo-model"
    codec, kept = ChatCodec.from_directory(path), ChatCodec.from_directory(path, drop_nonces=False)
    head = "x-anthropic-billing-header: cc_version=2.1.9.{}; cch={};\nYou are an agent."
    asked = [
        Conversation((Message("system", head.format(i, i)), Message("user", "Go on.")))
        for i in ("1f2", "e07")
    ]
    one, two = (codec.encode(conversation).ids for conversation in asked)
    assert one.tolist() == two.tolist()
    one, two = (kept.encode(conversation).ids for conversation in asked)
    assert one.tolist() != two.tolist(), "the option keeps them"
