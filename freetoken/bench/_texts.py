"""Prompts as text for servers: pieces of a model's walk, or of English text. No two begin alike."""

from __future__ import annotations

import json
from pathlib import Path

from freetoken.core.errors import ConfigError

_STRIDE = 1777
_WORDS = Path(__file__).resolve().parent.parent / "data" / "dictionary.tsv"
_MOST_CHARS = 2_000_000


class Texts:
    """model: a folder that may have walk.json; a walk's word is one token, an English word about 1.3."""

    def __init__(self, model: str = "", start: int = 0) -> None:
        walk = Path(model) / "walk.json"
        self.walks = walk.is_file()
        if self.walks:
            self._words: list[str] = json.loads(walk.read_text("utf-8"))["text"]
        else:
            self._words = [f" {word}" for word in _WORDS.read_text("utf-8")[:_MOST_CHARS].split()]
        if not self._words:
            raise ConfigError(f"{walk} holds no words.", code="invalid_json")
        self._number = start

    def take(self, count: int) -> str:
        """A prompt of `count` words."""
        return self.at(self._next(), count)

    def take_with_answer(self, count: int, answer: int) -> tuple[str, list[str] | None]:
        """A prompt, and the words that should follow; None without a walk."""
        at = self._next()
        follow = [word.strip() for word in self._cut(at + count, answer)] if self.walks else None
        return self.at(at, count), follow

    def at(self, start: int, count: int) -> str:
        return "".join(self._cut(start, count))

    def _next(self) -> int:
        self._number += 1
        return (self._number - 1) * _STRIDE

    def _cut(self, start: int, count: int) -> list[str]:
        n = len(self._words)
        start %= n
        return (self._words[start:] + self._words * (count // n + 1))[:count]
