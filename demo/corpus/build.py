# ruff: noqa: E501, E731, SIM905 - sentences and small makers read best on one line
"""Unpacked packages -> corpus.jsonl.xz (plain text) and lexicon.json.xz (words and facts for the chat generator).

usage: python -m demo.corpus.build ROOT OUT      ROOT: where `dpkg -x` put the packages of sources.PACKAGES
"""

import gzip
import importlib
import inspect
import json
import lzma
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from demo.corpus.cleaning import UNWANTED, held_out, is_prose, tidy
from demo.corpus.html_text import page_text, split_pages
from demo.corpus.sources import SOURCES
from demo.corpus.wordnet import WordNet

_NO_PAGE = re.compile(
    r"genindex|py-modindex|contents\.html|/search\.html|whatsnew/changelog|print\.html|/toc\.html|bookindex|releaselog"
)
_NO_MODULE = set(
    "antigravity this idlelib lib2to3 turtledemo test ensurepip msilib winreg winsound msvcrt nt ntpath".split()
)
_COUNTRIES = (
    "country African_country European_country Asian_country South_American_country North_American_country Asian_nation"
    " African_nation European_nation"
).split()
_PEOPLE = (
    "writer physicist chemist mathematician composer painter philosopher explorer astronomer poet".split()
)


def jargon(share: Path) -> Iterator[str]:
    """Entries of the Jargon File, which starts each at the left margin."""
    entry: list[str] = []
    with gzip.open(share / "dictd/jargon.dict.dz", "rt", errors="replace") as f:
        lines = f.read().split("\n")[40:]
    for line in [*lines, "END"]:
        if line and not line.startswith(" "):
            if len(entry) > 1:
                text = re.sub(r"(?<=\S)\n +(?=\S)", " ", "\n".join(entry))
                yield re.sub(r"\{\s*([^{}]*?)\s*\}", r"\1", text)
            entry = [line]
        else:
            entry.append(line)


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library of the Python that runs this."""
    for name in sorted(set(sys.stdlib_module_names) - _NO_MODULE):
        if name.startswith("_"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for key, value in [("", module), *sorted(vars(module).items())]:
            home = (getattr(value, "__module__", None) or name).split(".")[0].lstrip("_")
            text = inspect.getdoc(value) if not key.startswith("_") and home in (name, "builtins") else None
            if text and (not key or callable(value)):
                yield f"{name}.{key}\n\n{text}" if key else f"Module {name}\n\n{text}"


def pages(share: Path, globs: tuple[str, ...]) -> Iterator[str]:
    for pattern in globs:
        for path in sorted(share.glob(pattern)):
            if not _NO_PAGE.search(str(path)):
                yield from split_pages(page_text(path))


def documents(root: Path, wordnet: WordNet) -> Iterator[tuple[str, str]]:
    """(source, text) of every document worth learning, at most Source.megabytes of each."""
    share = root / "usr/share"
    special = {"wordnet": wordnet.documents, "jargon": lambda: jargon(share), "docstrings": docstrings}
    seen: set[int] = set()
    for source in SOURCES:
        left, count = source.megabytes * 1e6, 0
        for raw in special.get(source.name, lambda s=source: pages(share, s.globs))():
            text = tidy(raw)
            if not is_prose(text) or hash(text) in seen or re.search(r"checked-by|matrix:|R-\d{5}-", text):
                continue
            if left < len(text):
                break
            seen.add(hash(text))
            left -= len(text)
            count += 1
            yield source.name, text
        print(f"{source.name:14s} {count:7d} documents {source.megabytes - left / 1e6:6.2f} MB", flush=True)


def lexicon(root: Path, wordnet: WordNet) -> dict[str, list]:
    """Word lists, definitions and names for the chat generator."""
    best = wordnet.best_senses()
    count: dict[str, int] = {}
    for s in wordnet.senses():
        count[s.word] = count.get(s.word, 0) + s.count
    single = sorted(w for w in count if re.fullmatch(r"[a-z]{3,12}", w) and not UNWANTED.search(w))
    common = sorted((w for w in single if count[w] >= 3), key=lambda w: -count[w])
    of = lambda pos, least: [w for w in common if (w, pos) in best and best[w, pos].count >= least]
    names = (root / "usr/share/dict/american-english").read_text().split("\n")
    lists = dict(
        single=single,
        common=common,
        nouns=of("noun", 1),
        verbs=of("verb", 3),
        adjs=of("adjective", 1),
        proper=sorted({n for n in names if re.fullmatch(r"[A-Z][a-z]{2,11}", n) and not UNWANTED.search(n)}),
        cities=wordnet.instances("city", "national_capital", "state_capital", "port", "town"),
        countries=wordnet.instances(*_COUNTRIES),
        people=wordnet.instances(*_PEOPLE),
    )
    lists["held"] = sorted({w for v in list(lists.values()) for w in v if held_out(w)})
    lists["defs"] = [
        (s.word, s.pos, s.gloss, s.count, s.examples[0] if s.examples else "")
        for s in best.values()
        if 12 < len(s.gloss) < 170 and re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,24}", s.word)
    ]
    return lists


def main(root: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    wordnet = WordNet(root / "usr/share/wordnet")
    docs = list(documents(root, wordnet))
    random.Random(0).shuffle(docs)
    with lzma.open(out / "corpus.jsonl.xz", "wt", preset=6) as f:
        for source, text in docs:
            f.write(json.dumps({"s": source, "t": text}, ensure_ascii=False) + "\n")
    words = lexicon(root, wordnet)
    prose = [p for s, t in docs if s in ("python", "apache", "django", "rust") for p in t.split("\n\n")]
    prose = [p for p in prose if 120 < len(p) < 600 and "\n" not in p and p.isascii()]
    words["paragraphs"] = random.Random(1).sample(prose, min(4000, len(prose)))
    with lzma.open(out / "lexicon.json.xz", "wt", preset=6) as f:
        json.dump(words, f)
    print(f"total {sum(len(t) for _, t in docs) / 1e6:.1f} MB", {k: len(v) for k, v in words.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
