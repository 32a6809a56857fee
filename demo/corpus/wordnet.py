# ruff: noqa: E501 - sentences and small makers read best on one line
"""Reads WordNet's data files: senses, examples, frequencies, and instances such as cities.

Knows nothing about chats. A `Sense` is one reading of one word; `count` is how often it was tagged in WordNet's own texts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from demo.corpus.cleaning import UNWANTED

PART_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_SENSE_NUMBER = {"n": 1, "v": 2, "a": 3, "r": 4, "s": 5}


@dataclass(frozen=True)
class Sense:
    word: str
    pos: str
    gloss: str
    examples: tuple[str, ...]
    count: int


@dataclass
class Synset:
    words: list[tuple[str, str]]
    pos: str
    lexfile: str
    gloss: str
    examples: tuple[str, ...]
    pointers: list[list[str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [w.replace("_", " ") for w, _ in self.words]


class WordNet:
    """All synsets below `folder` (wordnet-base's usr/share/wordnet) free of unwanted words."""

    def __init__(self, folder: Path) -> None:
        self._counts = {}
        for line in (folder / "cntlist.rev").read_text().splitlines():
            key, _, count = line.split()
            self._counts[key] = int(count)
        self._all: dict[tuple[str, str], Synset] = {}
        for name in ("noun", "verb", "adj", "adv"):
            for line in (folder / f"data.{name}").read_text(errors="replace").splitlines():
                if not line.startswith(" "):
                    self._add(line)
        self.synsets = [
            s for s in self._all.values() if not UNWANTED.search(" ".join([s.gloss, *s.examples, *s.names]))
        ]

    def _add(self, line: str) -> None:
        head, _, gloss = line.partition(" | ")
        f = head.split()
        pos, n = f[2], int(f[3], 16)
        words = [(re.sub(r"\(\w+\)$", "", f[4 + 2 * i]), f[5 + 2 * i]) for i in range(n)]
        start = 5 + 2 * n
        pointers = [f[start + 4 * i : start + 4 * i + 4] for i in range(int(f[4 + 2 * n]))]
        examples = tuple(re.findall(r'"([^"]+)"', gloss))
        meaning = re.split(r'; ?"', gloss.strip())[0].strip(" ;")
        self._all["a" if pos == "s" else pos, f[0]] = Synset(words, pos, f[1], meaning, examples, pointers)

    def parent(self, synset: Synset, kinds: tuple[str, ...] = ("@", "@i")) -> Synset | None:
        """The first hypernym, or with kinds ("@i",) what the synset is an instance of."""
        return next((self._all.get((p[2], p[1])) for p in synset.pointers if p[0] in kinds), None)

    def senses(self) -> Iterator[Sense]:
        for s in self.synsets:
            for word, lex_id in s.words:
                key = f"{word.lower()}%{_SENSE_NUMBER[s.pos]}:{s.lexfile}:{int(lex_id, 16):02d}::"
                yield Sense(
                    word.replace("_", " "),
                    PART_OF_SPEECH[s.pos],
                    s.gloss,
                    s.examples[:1],
                    self._counts.get(key, 0),
                )

    def best_senses(self) -> dict[tuple[str, str], Sense]:
        """The most frequent sense of each (word, part of speech)."""
        best: dict[tuple[str, str], Sense] = {}
        for s in self.senses():
            k = (s.word, s.pos)
            if k not in best or s.count > best[k].count:
                best[k] = s
        return best

    def instances(self, *kinds: str) -> list[str]:
        """Proper names of the given kinds, such as `national_capital`."""
        names = set()
        for s in self.synsets:
            parent = self.parent(s, ("@i",))
            if parent and parent.words[0][0] in kinds:
                names |= {n for n in s.names if re.fullmatch(r"[A-Z][A-Za-z'. -]{2,22}", n)}
        return sorted(names)

    def documents(self) -> Iterator[str]:
        """Each synset as a small dictionary article."""
        for s in self.synsets:
            names = s.names
            parts = [f"{names[0]} ({PART_OF_SPEECH[s.pos]}): {s.gloss}."]
            if len(names) > 1:
                parts.append("Synonyms: " + ", ".join(names[1:]) + ".")
            kind = self.parent(s, ("@",))
            if kind and s.pos == "n":
                parts.append(f"It is a kind of {kind.names[0]}.")
            parts += [f'Example: "{e}".' for e in s.examples[:2]]
            yield " ".join(parts)
