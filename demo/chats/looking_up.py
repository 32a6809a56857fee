# ruff: noqa: E501 - sentences and small makers read best on one line
"""Knowledge through tools: words, capitals and short facts are looked up, never recited.

Owns the reading of a tool's answer and the honest reply when there is nothing to look up with, or nothing was found.
"""

import re

from demo.chats.dice import Dice
from demo.chats.packing import pack, param
from demo.chats.tasks import Task, quoted, upper_first

_CAPITAL = re.compile(
    r"(?:the )?(?:[a-z]+ )?capital(?: and [a-z ]+?)? (?:city )?of ((?:the )?[A-Z][a-z]+(?: [A-Z][a-z]+)?)\b"
)


def capitals(d: Dice) -> list[tuple[str, str]]:
    """(capital, country) pairs that the glosses state; found once per Dice."""
    if not hasattr(d, "_capitals"):
        found = [(x[0], _CAPITAL.match(x[2])) for x in d.definitions if "capital" in x[2]]
        d._capitals = [(w, m.group(1)) for w, m in found if m and "capital" not in w] or [("Paris", "France")]
    return d._capitals


def _article(pos: str) -> str:
    return "an" if pos[0] == "a" else "a"


def define(d: Dice) -> Task:
    """A word's meaning from a dictionary tool."""
    w, pos, gloss, _, example = d.definition()
    missing = d.chance(0.07)
    response = d.pick(
        [
            {"word": w, "definition": gloss},
            {"definition": gloss, "pos": pos},
            f"{w} ({pos}): {gloss}",
            gloss,
            {"word": w, "pos": pos, "definition": gloss, "example": example},
        ]
    )
    answers = [
        f"{upper_first(w)} means {gloss}.",
        f"{upper_first(w)}: {gloss}.",
        f"As {_article(pos)} {pos}, {w} means {gloss}.",
        f"According to the dictionary, {w} means {gloss}.",
    ]
    if "pos" not in str(response) and pos not in str(response)[:30]:
        answers.pop(2)
    if missing:
        response = d.pick(
            [{"error": "not found"}, "not found", "no entry", {"word": w, "definition": None}, "[]"]
        )
        answers = [f"Sorry, the dictionary has no entry for {w}.", f"I could not find {w} in the dictionary."]
    q = quoted(d, w)
    queries = [
        f"What does {q} mean?",
        f"What is the meaning of {w}?",
        f"Define {w}.",
        f"define {w}",
        f"What does the word {q} mean?",
        f"Explain the word {q}.",
        f"Give me a definition of {w}.",
        f"What is {w}?" if pos == "noun" else f"What does {w} mean?",
        f"meaning of {w}?",
        f"Look up {q}.",
        f"Look up {q} in the dictionary.",
        f"dictionary: {w}",
        f"Tell me what {w} means.",
    ]
    names = "define/define/lookup/lookup word/dictionary/get definition/define word/dictionary lookup"
    pair = (param(d, "word/word/word/term/query/entry", "string", "The word to look up"), w)
    return pack(
        d,
        names,
        [
            "Look up a word in the dictionary",
            "Get the definition of a word",
            "The meaning of a word.",
            "Look up a word or a name.",
        ],
        [pair],
        queries,
        response,
        answers,
        f"look up the word {w}",
    )


def capital(d: Dice) -> Task:
    """A country's capital from a look-up tool."""
    city, land = d.pick(capitals(d))
    extra = d.phrase(3, 6)
    response = d.pick(
        [
            f"{land}: {extra}. Its capital is {city}.",
            {"name": land, "capital": city},
            {"result": f"{city} is the capital of {land}"},
            f"{city}: the capital of {land}",
            {"entry": land, "definition": f"{extra}; capital: {city}"},
        ]
    )
    pair = (param(d, "word/query/name/term/topic/country", "string", "What to look up"), land)
    return pack(
        d,
        "lookup/look up/lookup fact/facts/encyclopedia/wiki/define/get country",
        ["Look up a fact", "Look up a word or a name", "A short encyclopedia entry", "Facts about a place"],
        [pair],
        [
            f"What is the capital of {land}?",
            f"capital of {land}?",
            f"Which city is the capital of {land}?",
            f"Name the capital of {land}.",
        ],
        response,
        [f"The capital of {land} is {city}.", f"It is {city}."],
        f"look up {land}",
    )


def fact(d: Dice) -> Task:
    """A person, a place or a thing from a look-up tool."""
    name, _, gloss = d.definition()[:3]
    for _ in range(20):
        if name[0].isupper():
            break
        name, _, gloss = d.pick(d.definitions)[:3]
    person = (
        name in d.words["people"]
        if d.chance(0.02)
        else bool(
            re.search(
                r"\b(who|writer|poet|painter|composer|physicist|chemist|philosopher|politician|statesman|actor|author)\b",
                gloss,
            )
        )
    )
    queries = (
        [f"Who was {name}?", f"Who is {name}?", f"Tell me about {name}."]
        if person
        else [
            f"What is {name}?",
            f"Tell me about {name}.",
            f"What do you know about {name}?",
            f"Where is {name}?",
        ]
    )
    response = d.pick(
        [gloss, f"{name}: {gloss}", {"title": name, "text": gloss}, {"entry": name, "definition": gloss}]
    )
    pair = (param(d, "query/name/term/topic/title/word", "string", "What to look up"), name)
    return pack(
        d,
        "lookup/look up/lookup fact/facts/encyclopedia/wiki/lookup topic",
        [
            "Look up a fact",
            "Look up a word or a name",
            "A short encyclopedia entry",
            "Look up a person, place or thing",
        ],
        [pair],
        queries,
        response,
        [f"{name}: {gloss}.", f"{name} is {gloss}."],
        f"look up {name}",
    )


def unknown(d: Dice) -> tuple[str, str, str]:
    """(question, honest reply, thought) where no tool can help."""
    w = d.definition()[0]
    x = d.r.random()
    if x < 0.4:
        question = d.pick(
            [
                f"What does {w} mean?",
                f"Define {w}.",
                f"What is {w}?",
                f"What is the meaning of {w}?",
                f"Explain {w}.",
                f"define {w}",
                f"Tell me what {w} means.",
            ]
        )
        answer = d.pick(
            [
                f"I'm too small to know words by heart. With a dictionary tool I could look up {w}.",
                f"I don't know {w} well enough to explain it. Give me a dictionary tool and I will look it up.",
                f"Sorry, I can't define {w} without a dictionary tool.",
            ]
        )
        return question, answer, "I don't know words by heart and have no dictionary."
    if x < 0.6:
        land = d.country()
        return (
            d.pick(
                [
                    f"What is the capital of {land}?",
                    f"capital of {land}?",
                    f"How many people live in {land}?",
                    f"Where is {land}?",
                ]
            ),
            d.pick(
                [
                    f"I don't know that about {land}. With a look-up tool I could find it.",
                    "Sorry, I don't know. I am a small model without facts of my own.",
                ]
            ),
            "I don't know facts by heart.",
        )
    who = d.person()
    question = d.pick(
        [
            f"Who is {who}?",
            f"Who was {who}?",
            f"When was {who} born?",
            f"Who invented the {d.noun()}?",
            f"What happened in {d.whole(1500, 2020)}?",
            f"What is the news about {w}?",
            f"Who won the {w} prize?",
            f"How far is {d.place()} from {d.place()}?",
            f"How does a {d.noun()} work?",
            f"Why is the {d.noun()} {d.pick(d.words['adjs'])}?",
            f"Translate {w} to French.",
            f"Write an essay about {w}.",
            f"How do I build a {d.noun()}?",
            f"What do you think about {w}?",
        ]
    )
    return (
        question,
        d.pick(
            [
                "Sorry, I don't know. I am a small model without facts of my own.",
                "I'm sorry, I don't know that.",
                "I don't know. With a search tool I could look it up.",
                "That is more than I know. Please ask me something simpler or give me a tool.",
            ]
        ),
        "I don't know this, so I will say so.",
    )


LOOKUPS = {define: 1.5, capital: 0.5, fact: 0.7}
