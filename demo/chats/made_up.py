# ruff: noqa: E501, E731, SIM905 - sentences and small makers read best on one line
"""Tools that exist nowhere: random verb, noun, parameters and values, flat or nested.

Owns the shapes of made-up schemas; a model that calls these right has learnt to read a schema, not to know a tool.
"""

import json
from dataclasses import dataclass

from demo.chats.dice import Dice
from demo.chats.tasks import Param, Task, said, spoken, styled, tool_schema, upper_first

VERBS = (
    "get fetch find create update delete list send set check compute convert add remove search lookup query read write start"
    " stop schedule cancel book order track open close lock unlock enable disable register assign archive export import print"
    " scan load save move copy rename share publish approve reject calculate estimate measure compare validate verify translate"
    " summarize analyze inspect monitor deploy restart resolve upload download sync merge split tag label rate review reserve"
    " renew activate block ping call notify invite join leave"
).split()
PARAMETERS = (
    "name id title path query date time amount limit email user_id city location country url subject body message text status"
    " priority category description start_date end_date count size color language format tag key value type code source target"
    " owner phone address file_name folder topic unit quantity price width height level mode timeout page version reason notes"
    " channel room project branch"
).split()
_NUMERIC = set("count limit quantity amount size page timeout width height level price".split())
_KINDS = {
    "string": 60,
    "integer": 13,
    "number": 5,
    "boolean": 6,
    "enum": 6,
    "strings": 4,
    "numbers": 1,
    "object": 3,
    "objects": 2,
}
_NESTED = {"string": 20, "integer": 8, "strings": 16, "numbers": 6, "object": 28, "objects": 22}
_ERRORS = [
    "not found",
    "permission denied",
    "timeout",
    "invalid request",
    "service unavailable",
    "no such {n}",
]
_STATES = ["ok", "success", "done", "pending", "active", "created", "queued"]


@dataclass(frozen=True)
class _Spec:
    """A parameter with its words, and whether a request must name it."""

    param: Param
    base: str
    idle: bool


def _value(d: Dice, kind: str, base: str, choices: tuple[str, ...], fields: tuple[Param, ...]):
    if choices:
        return d.pick(choices)
    if kind == "string":
        return d.value_for(base)
    if kind == "integer":
        return d.number()
    if kind == "number":
        return d.decimal() if d.chance(0.7) else d.number()
    if kind == "boolean":
        return d.chance(0.6)
    if kind == "strings":
        return [d.weighted({Dice.word: 5, Dice.person: 2, Dice.ident: 1})(d) for _ in range(d.whole(1, 4))]
    if kind == "numbers":
        return [d.number() for _ in range(d.whole(2, 4))]
    one = lambda: {f.name: _value(d, f.kind, f.name, (), ()) for f in fields}
    return one() if kind == "object" else [one() for _ in range(d.whole(1, 3))]


def _fields(d: Dice, style: int) -> tuple[Param, ...]:
    names: dict[str, Param] = {}
    for _ in range(d.whole(2, 3)):
        base = d.pick(PARAMETERS).split("_") if d.chance(0.6) else [d.noun()]
        kind = (
            "integer" if base[0] in _NUMERIC else d.pick(["string", "string", "string", "integer", "boolean"])
        )
        name = styled(base, 1 if style in (1, 3) else 0)
        names[name] = Param(name, kind)
    return tuple(names.values())


def _about(d: Dice, words: str, noun: str) -> str:
    return d.pick(
        [
            f"The {words} of the {noun}",
            f"The {words}",
            f"{upper_first(words)} to use",
            f"{upper_first(words)} for the {noun}",
            "",
            upper_first(words),
        ]
    )


def _bit(d: Dice, name: str, words: str, value: object) -> str:
    if isinstance(value, bool):
        on = "on" if value else "off"
        return d.pick(
            [
                f"set {words} to {str(value).lower()}",
                f"{words} {on}",
                f"{words}: {str(value).lower()}",
                f"with {words} {'enabled' if value else 'disabled'}",
            ]
        )
    text = said(d, value)
    if isinstance(value, (dict, list)):
        return d.pick(
            [
                f"{words}: {text}",
                f"{words} {text}",
                f"with {words} {text}",
                f"the {words}: {text}",
                f"{name}={text}",
            ]
        )
    return d.pick(
        [
            f"{words} {text}",
            f"the {words} is {text}",
            f"{words}: {text}",
            f"{words} = {text}",
            f"with {words} {text}",
            f"use {text} as the {words}",
            f"{words} should be {text}",
            f"{name}={text}",
        ]
    )


def _spec(d: Dice, noun: str, style: int, kinds: dict, required: bool, idle: bool = False) -> _Spec:
    x = d.r.random()
    base = (
        d.pick(PARAMETERS).split("_")
        if x < 0.5
        else [d.noun()]
        if x < 0.85
        else [d.noun(), d.pick(["id", "name", "type", "code", "date", "count", d.noun()])]
    )
    kind = d.weighted(kinds)
    if "_".join(base) in _NUMERIC and kind == "string":
        kind = d.pick(["integer", "integer", "number"])
    choices: tuple[str, ...] = ()
    if kind == "enum":
        kind, choices = "string", tuple(dict.fromkeys(d.word() for _ in range(d.whole(2, 4))))
    fields = _fields(d, style) if kind in ("object", "objects") else ()
    name = styled(base, 1 if style in (1, 3) else 0)
    return _Spec(
        Param(name, kind, _about(d, " ".join(base), noun), required, choices, fields), "_".join(base), idle
    )


def _request(d: Dice, name: str, goal: str, bits: list[str]) -> str:
    pre = d.pick(
        [
            "Please ",
            "Can you ",
            "I want to ",
            "Could you ",
            "",
            "",
            "",
            "I need you to ",
            "Now ",
            "please ",
            "Help me ",
            "Let's ",
        ]
    )
    joined = (
        d.pick([", ", " and ", ", "]).join(bits)
        if len(bits) < 3
        else ", ".join(bits[:-1]) + d.pick([" and ", ", ", ", and "]) + bits[-1]
    )
    x, twice = d.r.random(), bits and bits[0].startswith("with ")
    if not bits:
        text = pre + goal
    elif x < 0.5:
        text = (
            pre
            + goal
            + d.pick([" " if twice else " with ", ", ", ": ", " where " if not twice else " ", " - "])
            + joined
        )
    elif x < 0.65:
        text = upper_first(joined) + ". " + upper_first(pre + goal)
    elif x < 0.83:
        text = pre + goal + ". " + " ".join(upper_first(b) + "." for b in bits)
    else:
        text = (
            pre
            + d.pick([f"use {name}", f"call {name}", f"run the {name} tool", f"call the {name} function"])
            + d.pick([" " if twice else " with ", ": ", ", "])
            + joined
        )
    text = upper_first(text) if d.chance(0.8) else text
    return (
        text
        if text.endswith(".")
        else text + d.pick([".", ".", "", "?" if pre[:3] in ("Can", "Cou") else ".", "!"])
    )


class MadeUpTool:
    """A random tool; `task` draws any number of requests for it. nested=True has at least one array or object."""

    def __init__(self, d: Dice, nested: bool = False) -> None:
        self.d = d
        style = d.r.choices([0, 1, 2, 3], [0.7, 0.17, 0.08, 0.05])[0]
        self.verb = d.pick(VERBS) if d.chance(0.75) else d.pick(d.words["verbs"])
        noun = [d.noun()] if d.chance(0.65) else [d.noun(), d.noun()] if d.chance(0.6) else [d.made_up()]
        parts = [self.verb, *noun] if d.chance(0.85) else [*noun, self.verb]
        if d.chance(0.06):
            parts = [
                d.pick(["crm", "api", "app", "my", "db", "sys", "home", "shop", "user", d.made_up()]),
                *parts,
            ]
        self.name, self.thing = styled(parts, style), " ".join(noun)
        count = d.whole(1, 3) if nested else d.r.choices([0, 1, 2, 3, 4], [0.03, 0.35, 0.33, 0.21, 0.08])[0]
        specs = [
            _spec(d, self.thing, style, _NESTED if nested else _KINDS, i == 0 or d.chance(0.75))
            for i in range(count)
        ]
        while nested and not any(
            s.param.kind in _NESTED and s.param.kind not in ("string", "integer") for s in specs
        ):
            specs[0] = _spec(d, self.thing, style, _NESTED, True)
        specs += [
            _spec(d, self.thing, style, _KINDS, False, True)
            for _ in range(d.whole(1, 2) if d.chance(0.3) else 0)
        ]
        self.specs = list({s.param.name: s for s in reversed(specs)}.values())[::-1]
        if d.chance(0.3):
            d.r.shuffle(self.specs)
        v, t = self.verb, self.thing
        about = d.pick(
            [
                f"{upper_first(v)} the {t}",
                f"{upper_first(v)} a {t}",
                f"{upper_first(v)} {t}",
                f"Use this to {v} a {t}.",
                f"{upper_first(v)} the {t} with the given values.",
                f"Tool to {v} the {t}.",
                "",
            ]
        )
        self.tool = tool_schema(d, self.name, about, [s.param for s in self.specs])

    def task(self) -> Task:
        d = self.d
        given = [s for s in self.specs if s.param.required or not s.idle or d.chance(0.25)]
        args = {s.param.name: _value(d, s.param.kind, s.base, s.param.choices, s.param.fields) for s in given}
        bits = [_bit(d, s.param.name, s.base.replace("_", " "), args[s.param.name]) for s in given]
        if d.chance(0.25):
            d.r.shuffle(bits)
        article = d.pick(["the", "a", "the", "my", "this", "our"])
        goal = f"{self.verb} {article} {self.thing}"
        only = next(iter(args.values())) if len(args) == 1 else None
        if isinstance(only, str) and d.chance(0.5):
            text = said(d, only)
            goal, bits = (
                goal
                + " "
                + d.pick(
                    [
                        f"for {text}",
                        f"of {text}",
                        text,
                        f"called {text}",
                        f"with {text}",
                        f"at {text}",
                        f": {text}",
                    ]
                ),
                [],
            )
        response, answer = outcome(d, self.thing)
        why = f"{self.verb} {article if article in ('the', 'a') else 'the'} {self.thing}"
        return Task(self.tool, _request(d, self.name, goal, bits), self.name, args, response, answer, why)


def made_up_task(d: Dice, nested: bool = False) -> Task:
    """One request for a new made-up tool."""
    return MadeUpTool(d, nested).task()


def outcome(d: Dice, thing: str) -> tuple[str, str]:
    """What a made-up tool returns, and what we say about it."""
    x = d.r.random()
    if x < 0.08:
        error = d.pick(_ERRORS).format(n=thing)
        text = json.dumps({"error": error}) if d.chance(0.7) else f"Error: {error}"
        return text, d.pick(
            [
                f"Sorry, that did not work: {error}.",
                f"The tool reported an error: {error}.",
                f"I could not do it because of an error: {error}.",
            ]
        )
    if x < 0.2:
        value = d.value_for("")
        text = d.pick(["ok", "done", "success", f"{thing}: {value}", value])
        return text, d.pick(["Done.", f"Done, the {thing} is ready.", "It worked."]) if text in (
            "ok",
            "done",
            "success",
        ) else f"The {thing} is {value}."
    if x < 0.3:
        found = [d.value_for("name") for _ in range(d.whole(2, 4))]
        text = json.dumps(found if d.chance(0.5) else {"results": found}, ensure_ascii=False)
        return text, d.pick(["I found these: ", "The results are: ", "Here they are: "]) + ", ".join(
            found
        ) + "."
    fields: dict[str, object] = (
        {d.pick(["status", "result", "state"]): d.pick(_STATES)} if d.chance(0.5) else {}
    )
    for _ in range(d.whole(1, 3)):
        key = d.pick(PARAMETERS) if d.chance(0.4) else d.noun()
        fields[key] = d.value_for(key) if d.chance(0.65) else d.number() if d.chance(0.7) else d.decimal()
    text = (
        json.dumps(fields, ensure_ascii=False)
        if d.chance(0.85)
        else "\n".join(f"{k}: {v}" for k, v in fields.items())
    )
    facts = [f"the {spoken(k)} is {v}" for k, v in fields.items()]
    body = upper_first(", ".join(facts[:-1]) + (" and " if len(facts) > 1 else "") + facts[-1]) + "."
    return text, d.pick(["", "", "Done. ", "Here is the result. ", "It worked. "]) + body
