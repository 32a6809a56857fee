"""Keeps control text that people write from becoming control tokens.

A prompt is one rendered string in which the template's `<|im_end|>` must become a control id and a
user's must stay text. Before rendering, each control text inside user data is broken by a character
that no text uses (a Unicode noncharacter), so templates still see ordinary strings. Afterwards
- nothing broken (nearly always): the plain tokenizer encodes the string, ids as the reference's;
- else a twin of the tokenizer, whose control tokens are written with that character in front,
  encodes the string in one pass: the template's ones get the mark, the user's ones are mended.
Where the tokenizer allows it, both go piece by piece between control tokens, and pieces seen before
cost nothing (segments.py). Knows nothing of conversations.
Invariant: the twin differs from the tokenizer in spelling only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from freetoken.chat.segments import SegmentMemo, is_separable
from freetoken.chat.tokenizer import IntArray, Tokenizer, ids_of, valid_unicode

MARK = "\ufdd0"


class InertText:
    """Breaks control texts in user data and encodes rendered prompts.

    tokenizer  the model's
    control    texts of added tokens that only the template may produce
    """

    def __init__(self, tokenizer: Tokenizer, control: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._twin: tokenizers.Tokenizer | None = None
        self._twin_ids: dict[int, int] = {}
        found = {text: tokenizer.id_of(text) for text in control}
        self._control_ids = {
            text: np.array([id_], np.int32) for text, id_ in found.items() if id_ is not None
        }
        longest_first = sorted(control, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        tails = {text[cut:] for text in control for cut in range(1, len(text) - 1)}
        heads = {text[:cut] for text in control for cut in range(2, len(text))}
        self._heads, self._tails = frozenset(heads), frozenset(tails)
        self._reach = max(map(len, control), default=0)
        self.memo = SegmentMemo()
        self._separable = is_separable(tokenizer, sorted(control))

    def break_up(self, value: Any) -> Any:
        """Return JSON-like data with every control text in its strings broken; other data as it is."""
        if isinstance(value, str):
            return self._break_text(value)
        if isinstance(value, Mapping):
            return {self.break_up(key): self.break_up(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.break_up(item) for item in value]
        return value

    def encode(self, rendered: str) -> IntArray:
        """Encode a prompt rendered from broken-up data. Returns int32 [n]; adds no special tokens."""
        rendered = valid_unicode(rendered)
        if self._separable:
            return self._encode_pieces(rendered)
        if MARK not in rendered:
            return self._tokenizer.encode(rendered)
        parts = self._pattern.split(rendered)  # text, control, text, control, ... text
        parts[0::2] = [text.replace(MARK, "") for text in parts[0::2]]
        parts[1::2] = [MARK + control for control in parts[1::2]]
        ids = ids_of(self._twin_tokenizer(), "".join(parts))
        return np.array([self._twin_ids.get(i, i) for i in ids], np.int32)

    def _encode_pieces(self, rendered: str) -> IntArray:
        """The same, piece by piece: text, control, text, control, ... text."""
        parts: list[IntArray] = []
        for i, piece in enumerate(self._pattern.split(rendered)):
            if i % 2:
                parts.append(self._control_ids[piece])
            elif MARK in piece:
                parts.append(self.memo.encode(piece.replace(MARK, ""), True, self._encode_broken))
            elif piece:
                parts.append(self.memo.encode(piece, False, self._tokenizer.encode))
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _encode_broken(self, text: str) -> IntArray:
        """Text in which control texts are just text."""
        return np.array(ids_of(self._twin_tokenizer(), text), np.int32)

    def text(self, broken: str) -> str:
        """The text as people wrote it."""
        return broken.replace(MARK, "")

    def _break_text(self, text: str) -> str:
        text = text.replace(MARK, "")
        text = self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        # Two strings that the template writes side by side must not add up to a control text either.
        edge = range(2, min(self._reach, len(text) + 1))
        if any(text[-n:] in self._heads for n in edge):
            text += MARK
        if any(text[:n] in self._tails for n in edge):
            text = MARK + text
        return text

    def _twin_tokenizer(self) -> tokenizers.Tokenizer:
        if self._twin is None:
            backend = self._tokenizer.backend
            twin = tokenizers.Tokenizer.from_str(_respell(backend.to_str(), self._control))
            for text in self._control:
                ours, theirs = backend.token_to_id(text), twin.token_to_id(MARK + text)
                if ours != theirs and ours is not None and theirs is not None:
                    self._twin_ids[theirs] = ours
            self._twin = twin
        return self._twin


def _respell(serialised: str, control: frozenset[str]) -> str:
    """Write a mark in front of each control token, in the added tokens and in the vocabulary."""

    def spell(text: str) -> str:
        return MARK + text if text in control else text

    data = json.loads(serialised)
    for token in data["added_tokens"]:
        token["content"] = spell(token["content"])
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spell(text): id_ for text, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[spell(text), score] for text, score in model["vocab"]]
    if "merges" in model:
        joined = ((m, "".join(m.split(" ") if isinstance(m, str) else m)) for m in model["merges"])
        model["merges"] = [merge for merge, text in joined if text not in control]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spell(model["unk_token"])
    data["post_processor"] = data["truncation"] = data["padding"] = None
    return json.dumps(data, ensure_ascii=False)
