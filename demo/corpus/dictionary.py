# ruff: noqa: E501, SIM905 - sentences and small makers read best on one line
"""The small dictionary that ships with FreeToken, for the look-up tools that the demo model knows how to use.

usage: python -m demo.corpus.dictionary ROOT OUT.tsv

Lines of word, part of speech and meaning, sorted by word; the most used words of WordNet, and countries with their capitals.
Texts are WordNet's, under its licence; the licence's text goes beside the file.
"""

import re
import sys
from pathlib import Path

from demo.corpus.cleaning import UNWANTED
from demo.corpus.wordnet import Sense, WordNet

LIMIT = 590_000  # bytes
_CAPITAL = re.compile(
    r"(?:the )?(?:[a-z]+ )?capital(?: and [a-z ]+?)?(?: city)?(?: situated centrally)? (?:of|in) ((?:the )?[A-Z][a-z]+(?: [A-Z][a-z]+)?)\b"
)
_ASKED = set(
    "violin photosynthesis algorithm compiler brittle gravity molecule penguin umbrella dinosaur telescope volcano router cache token".split()
)
_WORD = re.compile(r"[A-Za-z][A-Za-z' -]{1,24}")


def entries(wordnet: WordNet) -> list[Sense]:
    """Countries and capitals first, then words by how often WordNet's texts use them."""
    best = [
        s
        for s in wordnet.best_senses().values()
        if _WORD.fullmatch(s.word) and len(s.gloss) < 280 and not UNWANTED.search(s.word)
    ]
    nations = set(
        wordnet.instances(
            "country",
            "African_country",
            "European_country",
            "Asian_country",
            "South_American_country",
            "North_American_country",
        )
    )
    cities = set(wordnet.instances("national_capital", "city"))
    named = [s for s in best if s.word in nations or (s.word in cities and s.gloss.startswith("the capital"))]
    named += [s for s in best if s.word in _ASKED and s.pos == "noun" or s.word == "brittle"]
    common = [
        s
        for s in best
        if (s.count >= 3 or s.count and s.pos == "noun") and len(s.gloss) < 160 and not s.word[0].isupper()
    ]
    return named + sorted(common, key=lambda s: -s.count)


def capitals(wordnet: WordNet) -> dict[str, str]:
    found = {}
    for s in wordnet.synsets:
        match = _CAPITAL.match(s.gloss)
        if match and s.pos == "n":
            found.setdefault(match.group(1).removeprefix("the "), s.names[0])
    return found


def main(root: Path, out: Path) -> None:
    wordnet = WordNet(root / "usr/share/wordnet")
    capital = capitals(wordnet)
    lines, size = {}, 0
    for s in entries(wordnet):
        tail = f"; its capital is {capital[s.word]}" if s.word in capital and s.word[0].isupper() else ""
        line = f"{s.word}\t{s.pos}\t{s.gloss}{tail}"
        if (s.word, s.pos) in lines or size + len(line.encode()) + 1 > LIMIT:
            continue
        lines[s.word, s.pos] = line
        size += len(line.encode()) + 1
    out.write_text("\n".join(lines[k] for k in sorted(lines, key=lambda k: (k[0].lower(), k))) + "\n")
    print(len(lines), "entries,", size, "bytes,", len(capital), "capitals")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
