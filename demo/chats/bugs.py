# ruff: noqa: E501, E731 - sentences and small makers read best on one line
"""Small programs with one thing to change: the problems of coding sessions.

A Problem knows its file before and after, the edit, and how user, test and agent speak of it. Invariant: the text to replace
occurs once in the file, and user or test or docstring tells what is right.
"""

import json
from dataclasses import dataclass

from demo.chats.dice import Dice

_PAIRS = [("sum", "+"), ("difference", "-"), ("product", "*"), ("quotient", "/"), ("remainder", "%")]
_COMPARE = [("larger", ">"), ("smaller", "<")]
_METHODS = [
    ("in upper case", "upper"),
    ("in lower case", "lower"),
    ("without outer spaces", "strip"),
    ("in title case", "title"),
]
_FOLDS = [("largest", "max"), ("smallest", "min"), ("number", "len"), ("sum", "sum")]
_ENDS = [("first", "[0]"), ("last", "[-1]")]


@dataclass
class Problem:
    """old -> new in `path`; `request` states the wish, `why` the finding ("it ..."), `failure` what the tests print before."""

    path: str
    text: str
    old: str
    new: str
    name: str
    request: str
    why: str
    failure: str

    @property
    def after(self) -> str:
        return self.text.replace(self.old, self.new, 1)


@dataclass
class _Function:
    """lines of a right function, the line a bug may replace and what it becomes, and the finding."""

    name: str
    lines: list[str]
    good: str
    bad: str
    why: str
    error: str = ""


def _two(d: Dice) -> tuple[str, str]:
    return (
        d.pick([("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("m", "n")])
        if d.chance(0.7)
        else (d.common(), d.noun() + "s")
    )


def _operator(d: Dice, name: str) -> _Function:
    (word, op), (_, wrong) = d.r.sample(_PAIRS, 2)
    a, b = _two(d)
    return _Function(
        name,
        [
            f"def {name}({a}, {b}):",
            f'    """Return the {word} of {a} and {b}."""',
            f"    return {a} {op} {b}",
        ],
        f"return {a} {op} {b}",
        f"return {a} {wrong} {b}",
        f"it used {wrong} instead of {op}",
    )


def _constant(d: Dice, name: str) -> _Function:
    k, x = d.whole(2, 99), d.pick(["x", "value", "n", d.noun()])
    op, word = d.pick([("*", "times"), ("+", "plus"), ("-", "minus")])
    wrong = d.pick([k + 1, k - 1, k * 10, d.whole(100, 200)])
    return _Function(
        name,
        [f"def {name}({x}):", f'    """Return {x} {word} {k}."""', f"    return {x} {op} {k}"],
        f"return {x} {op} {k}",
        f"return {x} {op} {wrong}",
        f"it used {wrong} instead of {k}",
    )


def _compare(d: Dice, name: str) -> _Function:
    (word, op), (_, wrong) = d.r.sample(_COMPARE, 2)
    a, b = _two(d)
    return _Function(
        name,
        [
            f"def {name}({a}, {b}):",
            f'    """Return the {word} of {a} and {b}."""',
            f"    return {a} if {a} {op} {b} else {b}",
        ],
        f"return {a} if {a} {op} {b} else {b}",
        f"return {a} if {a} {wrong} {b} else {b}",
        f"it compared with {wrong} instead of {op}",
    )


def _method(d: Dice, name: str) -> _Function:
    (word, m), (_, wrong) = d.r.sample(_METHODS, 2)
    x = d.pick(["text", "s", "line", d.noun()])
    return _Function(
        name,
        [f"def {name}({x}):", f'    """Return {x} {word}."""', f"    return {x}.{m}()"],
        f"return {x}.{m}()",
        f"return {x}.{wrong}()",
        f"it called {wrong} instead of {m}",
    )


def _fold(d: Dice, name: str) -> _Function:
    (word, f), (_, wrong) = d.r.sample(_FOLDS, 2)
    x = d.pick(["items", "values", "rows", d.noun() + "s"])
    return _Function(
        name,
        [f"def {name}({x}):", f'    """Return the {word} of {x}."""', f"    return {f}({x})"],
        f"return {f}({x})",
        f"return {wrong}({x})",
        f"it called {wrong} instead of {f}",
    )


def _end(d: Dice, name: str) -> _Function:
    (word, i), (_, wrong) = d.r.sample(_ENDS, 2)
    x = d.pick(["items", "values", "rows", d.noun() + "s"])
    return _Function(
        name,
        [f"def {name}({x}):", f'    """Return the {word} of {x}."""', f"    return {x}{i}"],
        f"return {x}{i}",
        f"return {x}{wrong}",
        f"it returned {x}{wrong} instead of {x}{i}",
    )


def _loop(d: Dice, name: str) -> _Function:
    total, x = d.pick(["total", "result", "count", "amount", d.noun()]), d.pick(["items", "values", "rows"])
    typo = total[:-2] + total[-1] if len(total) > 3 else total + "s"
    lines = [
        f"def {name}({x}):",
        f"    {total} = 0",
        f"    for v in {x}:",
        f"        {total} += v",
        f"    return {total}",
    ]
    return _Function(
        name,
        lines,
        f"return {total}",
        f"return {typo}",
        f"it returned {typo} instead of {total}",
        f"NameError: name '{typo}' is not defined",
    )


def _no_return(d: Dice, name: str) -> _Function:
    f = d.pick([_operator, _constant, _fold])(d, name)
    return _Function(
        name,
        f.lines,
        f.good,
        f.good.removeprefix("return "),
        "the return was missing",
        f"assert {name} returned None",
    )


_FUNCTIONS = [_operator, _operator, _constant, _compare, _method, _fold, _end, _loop, _no_return]


def module(d: Dice, count: int) -> tuple[list[_Function], str]:
    """`count` functions with different names, and a head of imports and constants."""
    names = list(dict.fromkeys(d.code_name() for _ in range(count)))
    head = d.pick(
        ["", "", f"import {d.pick(['os', 'sys', 'json', 're', 'math'])}\n\n", f'"""{d.phrase(2, 5)}."""\n\n']
    )
    head += "".join(f"{d.code_name().upper()} = {d.number()}\n" for _ in range(d.whole(0, 2)))
    return [d.pick(_FUNCTIONS)(d, n) for n in names], head


def bug(d: Dice, extra: int) -> Problem | None:
    """A module with one wrong line; None where the wrong line would not be unique."""
    functions, head = module(d, 1 + extra)
    target, path = d.pick(functions), d.path("py")
    good = (head + "\n" if head else "") + "\n\n\n".join("\n".join(f.lines) for f in functions) + "\n"
    text = good.replace(target.good, target.bad, 1)
    n = target.name
    if good.count(target.good) != 1 or text.count(target.bad) != 1:
        return None
    failure = f"FAILED {path}: test_{n}: " + (target.error or f"assert {n} failed, wrong result")
    request = d.pick(
        [
            f"The test of {n} in {path} fails. Please fix it.",
            f"{n} in {path} returns the wrong result. Fix it and run the tests.",
            f"Fix {n} in {path}.",
            f"There is a bug in {n} in {path}. Fix it.",
            f"Please repair the function {n} in {path} and test it.",
            f"{path}: {n} is wrong. Can you fix it?",
        ]
    )
    return Problem(path, text, target.bad, target.good, n, request, target.why, failure)


def setting(d: Dice, extra: int) -> Problem | None:
    """A constant of a module or a key of a config file, with the value that the user wants."""
    kind = d.pick(["py", "yaml", "json", "ini", "toml"])
    keys = list(dict.fromkeys(d.code_name() for _ in range(2 + extra)))
    make = lambda: d.number() if d.chance(0.7) else d.word()
    values = [make() for _ in keys]
    if kind == "py":
        keys = [k.upper() for k in keys]
    sep = {"yaml": ": ", "ini": "=", "json": ": "}.get(kind, " = ")
    show = lambda v: json.dumps(v) if kind in ("json", "py", "toml") else str(v)
    line = lambda k, v: (f'"{k}"' if kind == "json" else k) + sep + show(v)
    rows = [line(k, v) for k, v in zip(keys, values, strict=True)]
    text = (
        "{\n  " + ",\n  ".join(rows) + "\n}\n"
        if kind == "json"
        else ("[" + d.noun() + "]\n" if kind in ("ini", "toml") else "") + "\n".join(rows) + "\n"
    )
    i, path, value = d.whole(0, len(keys) - 1), d.path(kind), make()
    old, new = rows[i], line(keys[i], value)
    if text.count(old) != 1 or old == new:
        return None
    request = d.pick(
        [
            f"Set {keys[i]} to {value} in {path}.",
            f"Change {keys[i]} in {path} to {value}.",
            f"{keys[i]} in {path} should be {value}.",
            f"Please set {keys[i]} in {path} to {value} and run the tests.",
        ]
    )
    return Problem(
        path,
        text,
        old,
        new,
        keys[i],
        request,
        f"{keys[i]} is {value} now",
        f"FAILED {path}: {keys[i]} is {values[i]}, expected {value}",
    )


def rename(d: Dice, extra: int) -> Problem | None:
    functions, head = module(d, 1 + extra)
    target, path, name = d.pick(functions), d.path("py"), d.code_name()
    text = (head + "\n" if head else "") + "\n\n\n".join("\n".join(f.lines) for f in functions) + "\n"
    old, new = target.lines[0], target.lines[0].replace(target.name, name, 1)
    if text.count(old) != 1 or old == new:
        return None
    request = d.pick(
        [
            f"Rename the function {target.name} to {name} in {path}.",
            f"In {path}, {target.name} should be called {name}.",
            f"Please rename {target.name} in {path} to {name}.",
        ]
    )
    return Problem(
        path,
        text,
        old,
        new,
        target.name,
        request,
        f"it is called {name} now",
        f"FAILED {path}: ImportError: cannot import name '{name}'",
    )


def wording(d: Dice, extra: int) -> Problem | None:
    """A line of a text file to replace."""
    lines = list(dict.fromkeys(d.sentence() for _ in range(2 + extra)))
    i, path, new = d.whole(0, len(lines) - 1), d.path(d.pick(["md", "txt"])), d.sentence()
    text = "\n".join(lines) + "\n"
    if text.count(lines[i]) != 1 or new == lines[i]:
        return None
    request = d.pick(
        [
            f'Replace "{lines[i]}" with "{new}" in {path}.',
            f'In {path}, change "{lines[i]}" to "{new}".',
            f'{path} should say "{new}" instead of "{lines[i]}".',
        ]
    )
    return Problem(
        path,
        text,
        lines[i],
        new,
        path,
        request,
        "the line is replaced",
        f'FAILED {path}: expected "{new}" instead of "{lines[i]}"',
    )


def problem(d: Dice, extra: int | None = None) -> Problem:
    """Any problem; `extra` more functions, keys or lines make the file longer."""
    while True:
        more = d.r.choices([0, 1, 2, 4, 8], [0.3, 0.3, 0.2, 0.15, 0.05])[0] if extra is None else extra
        found = d.weighted({bug: 0.55, setting: 0.2, rename: 0.1, wording: 0.15})(d, more)
        if found:
            return found
