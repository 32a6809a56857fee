# ruff: noqa: E501, SIM905 - sentences and small makers read best on one line
"""Random words and values: the raw material of every generated chat.

Owns the random generator of one worker and the lexicon's word lists. Invariant: with held=True only the 5 % of words that
training never draws appear, with held=False never one of them. Blended words are endless, so copying cannot be memorised.
"""

import bisect
import json
import lzma
import random
import string
from itertools import accumulate
from pathlib import Path

from demo.corpus.cleaning import held_out

_SYLLABLES = (
    "ba be bo bra cal cor da del dra el fa fen gar gol har hel ira jo kal kor la lin lor ma mer mi na nor o pel pra qua ri"
    " ros sa sel sor ta tor tre ul va vel vor wa wen xan ya zel zor an ar bek den dor en eth fin gan ik is ka kan len mar"
    " mos nak ne nia ran ren ron sha tan tha tin ton us ven vik za"
).split()
_MONTHS = "January February March April May June July August September October November December".split()
_EXTENSIONS = "txt py md json csv log c rs html yaml toml sh ini js go xml".split()
_ROOTS = ["", "", "/", "/tmp/", "/etc/", "src/", "docs/", "./", "data/", "~/", "lib/", "tests/"]
_SENTENCES = [
    "the {a} is ready",
    "please check the {a}",
    "we need the {a} by {t}",
    "the {a} was moved to {t}",
    "your {a} has arrived",
    "do not forget the {a} for {p}",
    "I have finished the {a} and the {b}",
    "our {a} is late",
    "call {p} about the {a}",
    "the {a} needs a new {b}",
    "meet {p} at {t}",
    "bring the {a} and the {b}",
    "{p} has the {a}",
    "no {a} today, only {b}",
]


def load_lexicon(path: str | Path) -> dict[str, list]:
    with lzma.open(path, "rt") as f:
        return json.load(f)


class Dice:
    """Draws choices, words and values; `lexicon` is what demo.corpus.build wrote."""

    def __init__(self, lexicon: dict[str, list], seed: int = 0, held: bool = False) -> None:
        self.r = random.Random(seed)
        self.held = held
        mine = {w for w in lexicon["held"]}
        fits = (lambda w: w in mine) if held else (lambda w: w not in mine)
        self.words = {
            k: [w for w in lexicon[k] if fits(w)] or lexicon[k]
            for k in ("single", "common", "nouns", "verbs", "adjs", "proper", "cities", "countries", "people")
        }
        self.definitions = [d for d in lexicon["defs"] if held_out(d[0]) == held]
        self._cumulative = list(accumulate(min(d[3], 60) ** 0.5 for d in self.definitions))
        self.paragraphs = lexicon["paragraphs"]

    # ---- choices
    def pick(self, items):
        return items[int(self.r.random() * len(items))]

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def whole(self, low: int, high: int) -> int:
        return self.r.randint(low, high)

    def weighted(self, table: dict):
        return self.r.choices(list(table), list(table.values()))[0]

    # ---- words
    def noun(self) -> str:
        return self.pick(self.words["nouns"])

    def common(self) -> str:
        return self.pick(self.words["common"])

    def made_up(self) -> str:
        """A word that no list holds: syllables, or halves of two real words."""
        if self.chance(0.4):
            return "".join(self.pick(_SYLLABLES) for _ in range(self.whole(2, 3)))
        a, b = self.pick(self.words["single"]), self.pick(self.words["single"])
        return (a[: self.whole(2, max(2, len(a) - 1))] + b[self.whole(1, len(b) - 2) :])[:14]

    def word(self) -> str:
        return self.weighted_word()

    def weighted_word(self) -> str:
        x = self.r.random()
        return self.common() if x < 0.4 else self.pick(self.words["single"]) if x < 0.75 else self.made_up()

    def code_name(self) -> str:
        """A snake_case identifier of one to three words."""
        return "_".join(self.weighted_word() for _ in range(self.r.choices([1, 2, 3], [0.35, 0.5, 0.15])[0]))

    def definition(self):
        """(word, part of speech, gloss, count, example), frequent words more often."""
        if self.chance(0.3):
            return self.pick(self.definitions)
        at = bisect.bisect(self._cumulative, self.r.random() * self._cumulative[-1])
        return self.definitions[min(len(self.definitions) - 1, at)]

    # ---- values
    def ident(self) -> str:
        if self.chance(0.3):
            return "".join(self.pick("abcdef0123456789") for _ in range(self.whole(4, 10)))
        prefix = self.pick(
            [
                "",
                "",
                "u",
                "x",
                "ord",
                "id",
                "A",
                "B",
                "TK",
                "REF",
                "inv",
                "cus",
                self.pick(string.ascii_uppercase),
            ]
        )
        return prefix + self.pick(["-", "", "_", ""]) + str(self.whole(1, 10 ** self.whole(1, 6)))

    def person(self) -> str:
        x = self.r.random()
        if x < 0.45:
            return self.pick(self.words["proper"])
        if x < 0.7:
            return self.pick(self.words["proper"]) + " " + self.pick(self.words["proper"])
        return self.pick(self.words["people"]) if x < 0.8 else self.made_up().capitalize()

    def place(self) -> str:
        x = self.r.random()
        if x < 0.5:
            return self.pick(self.words["cities"])
        return (
            self.pick(self.words["proper"])
            if x < 0.7
            else self.made_up().capitalize()
            if x < 0.9
            else self.country()
        )

    def country(self) -> str:
        return self.pick(self.words["countries"])

    def email(self) -> str:
        tail = self.pick(["", self.word(), str(self.whole(1, 99))])
        return f"{self.word()}{self.pick(['.', '_', '']) if tail else ''}{tail}@{self.word()}.{self.pick(['com', 'org', 'net', 'io'])}"

    def date(self) -> str:
        if self.chance(0.75):
            return f"{self.whole(1990, 2035)}-{self.whole(1, 12):02d}-{self.whole(1, 28):02d}"
        return f"{self.pick(_MONTHS)} {self.whole(1, 28)}"

    def time(self) -> str:
        minute = self.pick([0, 15, 30, 45, self.whole(0, 59)])
        return (
            f"{self.whole(0, 23):02d}:{minute:02d}"
            if self.chance(0.7)
            else f"{self.whole(1, 12)} {self.pick(['am', 'pm'])}"
        )

    def file_name(self, extension: str = "") -> str:
        stem = self.word() + (self.pick(["_", "-"]) + self.word() if self.chance(0.3) else "")
        return f"{stem}.{extension or self.pick(_EXTENSIONS)}"

    def path(self, extension: str = "") -> str:
        root = self.pick([*_ROOTS, f"/home/{self.word()}/"])
        middle = "".join(self.word() + "/" for _ in range(self.r.choices([0, 1, 2], [0.6, 0.3, 0.1])[0]))
        return root + middle + self.file_name(extension)

    def folder(self) -> str:
        return self.pick(["/", "/tmp/", "src/", "./", "/var/", "~/", ""]) + "/".join(
            self.word() for _ in range(self.whole(1, 2))
        )

    def url(self) -> str:
        host = f"{self.word()}{self.pick(['.', '-'])}{self.word()}.{self.pick(['com', 'org', 'net', 'dev'])}"
        return f"https://{host}" + (f"/{self.word()}" if self.chance(0.5) else "")

    def phone(self) -> str:
        return "+" + "".join(self.pick(string.digits) for _ in range(self.whole(8, 12)))

    def version(self) -> str:
        return f"{self.whole(0, 9)}.{self.whole(0, 20)}.{self.whole(0, 9)}"

    def phrase(self, low: int = 2, high: int = 5) -> str:
        """Some words of a gloss, or loose words; no quotes or brackets."""
        if self.chance(0.45):
            words = self.pick(self.definitions)[2].split()
            at = self.whole(0, max(0, len(words) - 3))
            text = " ".join(words[at : at + self.whole(low, high)]).strip(" ,;:.'`-")
            if text and not set(text) & set("\"()`'"):
                return text
        return " ".join(self.word() for _ in range(self.whole(low, min(high, 4))))

    def sentence(self) -> str:
        """One line of prose without double quotes and without a full stop at its end."""
        if self.chance(0.5):
            example = self.definition()[4]
            if example and len(example) < 80 and '"' not in example:
                return example.strip().rstrip(".")
        return self.pick(_SENTENCES).format(a=self.word(), b=self.word(), t=self.time(), p=self.person())

    def number(self) -> int:
        x = self.r.random()
        return self.whole(0, 20) if x < 0.35 else self.whole(0, 500) if x < 0.7 else self.whole(500, 99999)

    def decimal(self) -> float:
        return round(self.r.uniform(0, 10 ** self.whole(0, 4)), self.whole(1, 2))

    def value_for(self, name: str) -> str:
        """A string that suits a parameter's name, or now and then any string."""
        maker = _BY_NAME.get(name)
        if maker and self.chance(0.85):
            return maker(self)
        return self.weighted(_ANY)(self)


_BY_NAME = {
    **dict.fromkeys(("date", "start_date", "end_date"), Dice.date),
    **dict.fromkeys(("city", "location"), Dice.place),
    **dict.fromkeys(("user_id", "id", "code"), Dice.ident),
    **dict.fromkeys(("name", "owner"), Dice.person),
    **dict.fromkeys(("body", "message", "text", "description"), Dice.sentence),
    **dict.fromkeys(("subject", "title", "notes", "query", "topic", "reason"), Dice.phrase),
    **dict.fromkeys(("path", "file_name"), Dice.path),
    "email": Dice.email,
    "time": Dice.time,
    "url": Dice.url,
    "folder": Dice.folder,
    "country": Dice.country,
    "phone": Dice.phone,
    "version": Dice.version,
}
_ANY = {
    Dice.word: 34,
    Dice.phrase: 16,
    Dice.person: 14,
    Dice.ident: 12,
    Dice.made_up: 10,
    Dice.email: 2,
    Dice.date: 2,
    Dice.time: 2,
    Dice.path: 3,
    Dice.url: 2,
    Dice.place: 3,
    Dice.sentence: 3,
}
