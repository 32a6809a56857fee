# ruff: noqa: E501 - sentences and small makers read best on one line
"""Learns the byte-level BPE tokenizer (8192 tokens) and tokenises the corpus.

usage: python -m demo.corpus.tokens DATA tokenizer|text

The BPE is learnt in two steps so that copying is easy: first without word-initial spaces, then " piece" merges come last. So
" Lisbon" and "Lisbon" always split alike, but for the space on the first piece. Digits and / _ - . @ ~ \\ stand alone.
The marks of the chat format take the last nine ids, 8183 to 8191.
"""

import json
import lzma
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.chats.chat_format import render
from demo.chats.dice import Dice, load_lexicon
from demo.chats.sessions import Chats

VOCABULARY, WITH_SPACE = 8192, 3000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_PER_SOURCE = 3_000_000


def _splitter(space: str) -> pre_tokenizers.Sequence:
    words = (
        rf"'(?:s|t|re|ve|m|ll|d)(?!\p{{L}})|\p{{N}}|{space}\p{{L}}+|{space}[/_\-.@~\\]|{space}[^\s\p{{L}}\p{{N}}/_\-.@~\\]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def read_corpus(data: Path) -> list[dict]:
    with lzma.open(data / "corpus.jsonl.xz", "rt") as f:
        return [json.loads(line) for line in f]


def training_texts(data: Path, chats: int = 9000) -> list[str]:
    """A few megabytes of every source, and chats without the marks."""
    used: Counter[str] = Counter()
    texts = []
    for doc in read_corpus(data):
        if used[doc["s"]] < _PER_SOURCE:
            used[doc["s"]] += len(doc["t"])
            texts.append(doc["t"])
    maker = Chats(Dice(load_lexicon(data / "lexicon.json.xz"), 12345))
    marks = "|".join(map(re.escape, SPECIAL + MARKS))
    for _ in range(chats):
        chat = maker.sample()
        texts.append(re.sub(marks, "\n", render(chat.messages, chat.tools)[0]))
    return texts


def learn_tokenizer(texts: list[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = _splitter("")
    first = VOCABULARY - WITH_SPACE - len(SPECIAL) - len(MARKS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=first, initial_alphabet=alphabet, show_progress=False, max_token_length=14
        ),
    )
    learnt = json.loads(tok.to_str())["model"]
    vocab, merges = (
        learnt["vocab"],
        [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learnt["merges"]],
    )
    probe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    probe.pre_tokenizer = _splitter(" ?")
    after_space: Counter[str] = Counter()
    for encoded in probe.encode_batch(texts[::2]):
        for a, b in zip(encoded.tokens, encoded.tokens[1:], strict=False):
            if a == "Ġ" and b[0] not in "ĠĊĉ0123456789":
                after_space[b] += 1
    for piece, _ in after_space.most_common(WITH_SPACE):
        vocab["Ġ" + piece] = len(vocab)
        merges.append(("Ġ", piece))
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = _splitter(" ?")
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKS])
    assert tok.get_vocab_size() == VOCABULARY, tok.get_vocab_size()
    return tok


def tokenise_corpus(data: Path) -> None:
    """text_train.npy and text_val.npy: uint16 ids, each document opened by <|endoftext|>; every 200th validates."""
    tok = Tokenizer.from_file(str(data / "tokenizer.json"))
    end = tok.token_to_id(SPECIAL[0])
    docs = read_corpus(data)
    parts: dict[str, list] = {"train": [], "val": []}
    for at in range(0, len(docs), 4096):
        for i, e in enumerate(tok.encode_batch([d["t"] for d in docs[at : at + 4096]]), at):
            parts["train" if i % 200 else "val"].append(np.array([end, *e.ids], np.uint16))
    for name, arrays in parts.items():
        ids = np.concatenate(arrays)
        np.save(data / f"text_{name}.npy", ids)
        print(name, len(ids), "tokens")


def main(data: Path, what: str) -> None:
    if what == "tokenizer":
        learn_tokenizer(training_texts(data)).save(str(data / "tokenizer.json"))
    else:
        tokenise_corpus(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
