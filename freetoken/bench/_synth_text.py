"""Words that a synthetic model speaks: a vocabulary of made-up words, and the cycle that decoding walks.

Owns tokenizer.json, its neighbours and walk.json. A word is a space and two syllables, and always one token,
so that engines emit one piece of text a token. Knows no weights.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freetoken.core.errors import ConfigError

SEGMENT = 64
"""Tokens that the walk stays in a topic."""
TOPICS = 64
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Walk:
    """The cycle: ids of its words, their texts, and the topic of each."""

    ids: list[int]
    text: list[str]
    topic: list[int]


def write_text_side(out: Path, words: int, vocab: int, seed: int) -> Walk:
    """Write tokenizer and walk of `words` words; ConfigError if a vocabulary of that size can't hold them."""
    syllables = _syllables(math.isqrt(words - 1) + 1)
    pieces, merges = _alphabet(), []
    for consonant, vowel in itertools.product(_CONSONANTS, _VOWELS):
        merges.append((consonant, vowel))
    merges += [(s[:2], s[2]) for s in syllables]
    merges += [("\u0120", s) for s in syllables]
    first = len(pieces) + len(merges)
    pairs = list(itertools.product(syllables, syllables))[:words]
    merges += [("\u0120" + a, b) for a, b in pairs]
    pieces += [a + b for a, b in merges]
    if len(pieces) + len(_SPECIALS) > vocab:
        raise ConfigError(
            f"{words} words need a vocabulary of {len(pieces) + len(_SPECIALS)}, the model's is {vocab}.",
            hint="Give fewer --words.",
        )
    _write_tokenizer(out, pieces, merges)
    walk = _walk(first, [f" {a}{b}" for a, b in pairs], seed)
    (out / "walk.json").write_text(
        json.dumps({"ids": walk.ids, "text": walk.text, "topic": walk.topic}), "utf-8"
    )
    return walk


def eos_ids(words: int) -> list[int]:
    """Ids that end an answer, in the vocabulary of `words` words."""
    used = 256 + len(_CONSONANTS) * len(_VOWELS) + 2 * (math.isqrt(words - 1) + 1) + words
    return [used + 2, used]


def _walk(first: int, texts: list[str], seed: int) -> Walk:
    """Segments of one topic each, shuffled into one cycle."""
    rng = np.random.default_rng(seed)
    words = rng.permutation(len(texts))
    ids: list[int] = []
    topic: list[int] = []
    for segment in rng.permutation(len(words) // SEGMENT):
        some = words[segment * SEGMENT : (segment + 1) * SEGMENT]
        ids += [first + int(word) for word in some]
        topic += [int(segment) % TOPICS] * SEGMENT
    return Walk(ids, [texts[i - first] for i in ids], topic)


def _syllables(count: int) -> list[str]:
    every = ["".join(s) for s in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS)]
    if count > len(every):
        raise ConfigError(f"At most {len(every) ** 2} words can be made up.", hint="Give fewer --words.")
    order = np.random.default_rng(0).permutation(len(every))
    return [every[i] for i in order[:count]]


def _alphabet() -> list[str]:
    """One printable character for each byte, as byte-level vocabularies write them."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(b) if b in keep else chr(next(spare)) for b in range(256)]


def _write_tokenizer(out: Path, pieces: list[str], merges: list[tuple[str, str]]) -> None:
    base = len(pieces)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [list(pair) for pair in merges],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": base + i, "content": s, **flags} for i, s in enumerate(_SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": _SPECIALS[2],
        "pad_token": _SPECIALS[0],
        "chat_template": _TEMPLATE,
        "model_max_length": 1 << 20,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1), "utf-8")
    generation = {"eos_token_id": [base + 2, base], "pad_token_id": base, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation), "utf-8")
