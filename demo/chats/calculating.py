# ruff: noqa: E501, SIM905 - sentences and small makers read best on one line
"""Arithmetic: sums with worked steps, and calculators of every schema.

Invariant: each stated result is right; the calculator's argument repeats the numbers of the request in their order.
"""

from demo.chats.dice import Dice
from demo.chats.packing import pack, param
from demo.chats.tasks import Param, Task, upper_first

_ITEMS = "apples books coins pencils stones eggs tickets stamps oranges cards marbles boxes cookies bottles chairs plants photos letters shells bricks".split()
_PLACES = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions"]
_WORDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


def compute(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[op]


def _spoken(d: Dice, a: int, op: str, b: int) -> str:
    forms = {
        "+": ["{a} plus {b}", "{a} + {b}", "the sum of {a} and {b}", "{a}+{b}"],
        "-": ["{a} minus {b}", "{a} - {b}", "{a}-{b}"],
        "*": [
            "{a} times {b}",
            "{a} * {b}",
            "{a} x {b}",
            "{a} multiplied by {b}",
            "the product of {a} and {b}",
            "{a}*{b}",
        ],
        "/": ["{a} divided by {b}", "{a} / {b}"],
    }
    return d.pick(forms[op]).format(a=a, b=b)


def _numbers(d: Dice) -> tuple[int, str, int]:
    op, a, b = d.pick("+-*/+*"), d.number(), d.number()
    if op == "*":
        b = d.whole(2, 99)
    if op == "/":
        b = d.whole(2, 20)
        a = b * d.whole(2, 400)
    return (b, op, a) if op == "-" and b > a else (a, op, b)


def calculator(d: Dice) -> Task:
    """A request for one operation through a calculator tool."""
    a, op, b = _numbers(d)
    v, text = compute(a, op, b), _spoken(d, a, op, b)
    queries = [
        f"What is {text}?",
        f"Calculate {text}.",
        f"Compute {text}",
        f"How much is {text}?",
        f"{text}?",
        f"Please work out {text}.",
        f"I need {text}.",
        f"What's {text}",
        f"Can you calculate {text}?",
        f"use the calculator: {text}",
    ]
    response = d.pick([str(v), {"result": v}, {"value": v}, f"result: {v}", {"answer": v, "status": "ok"}])
    answers = [
        f"{a} {op} {b} = {v}.",
        f"The result is {v}.",
        f"The answer is {v}.",
        f"{upper_first(text)} is {v}.",
    ]
    word, x = _WORDS[op], d.r.random()
    if x < 0.6:
        pairs = [
            (
                param(
                    d,
                    "expression/expr/formula/expression/input/calculation",
                    "string",
                    d.pick(["The expression to evaluate", "A math expression, e.g. 2 + 3", "Expression"]),
                ),
                f"{a} {op} {b}",
            )
        ]
        return pack(
            d,
            "calculator/calculate/calc/evaluate/eval math/math/compute",
            ["Evaluate a math expression", "A simple calculator", "Compute an arithmetic expression."],
            pairs,
            queries,
            response,
            answers,
            f"compute {a} {op} {b}",
        )
    numbers = [
        (param(d, "a/x/first/left/num1", "number", "First number"), a),
        (param(d, "b/y/second/right/num2", "number", "Second number"), b),
    ]
    if x < 0.8:
        pairs = [
            *numbers,
            (
                param(d, "operation/op/operator", "string", "The operation", True, tuple(_WORDS.values())),
                word,
            ),
        ]
        return pack(
            d,
            "calculator/calculate/arithmetic/math op",
            ["Do arithmetic with two numbers", "Apply an operation to two numbers"],
            pairs,
            queries,
            response,
            answers,
            f"{word} {a} and {b}",
        )
    return pack(
        d,
        f"{word}/{word} numbers/{word} two",
        [f"{upper_first(word)} two numbers", f"{upper_first(word)} a and b."],
        numbers,
        queries,
        response,
        answers,
        f"{word} {a} and {b}",
    )


def add_list(d: Dice) -> Task:
    """The sum, mean or extreme of a list: an array of numbers as the argument."""
    what = d.pick(["sum", "average", "maximum", "minimum"])
    xs = [d.number() for _ in range(d.whole(3, 5))]
    v = {"sum": sum(xs), "average": round(sum(xs) / len(xs), 2), "maximum": max(xs), "minimum": min(xs)}[what]
    text = ", ".join(map(str, xs[:-1])) + d.pick([" and ", ", "]) + str(xs[-1])
    pairs = [(Param(d.pick(["numbers", "values", "items", "data"]), "numbers", "The numbers"), xs)]
    return pack(
        d,
        f"{what}/{what} of/compute {what}/list {what}",
        [f"The {what} of a list of numbers", f"Compute the {what} of numbers"],
        pairs,
        [
            f"What is the {what} of {text}?",
            f"Compute the {what} of {text}.",
            f"{upper_first(what)} of {text}",
        ],
        d.pick([str(v), {"result": v}, {what: v}]),
        [f"The {what} is {v}.", f"The {what} of the numbers is {v}."],
        f"compute the {what}",
    )


def _add_steps(a: int, b: int) -> str:
    out, carry, x, y = [], 0, str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        p, q = int(x[i : i + 1] or 0), int(y[i : i + 1] or 0)
        s = p + q + carry
        out.append(
            f"{_PLACES[i]} {p} + {q}"
            + (f" + {carry}" if carry else "")
            + f" = {s}, write {s % 10}"
            + (" carry 1" if s > 9 else "")
        )
        carry = s // 10
    return "; ".join(out + ["write 1"] * carry) + "."


def _subtract_steps(a: int, b: int) -> str:
    out, borrow, x, y = [], 0, str(a)[::-1], str(b)[::-1]
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i : i + 1] or 0)
        s = p - q - borrow
        out.append(
            f"{_PLACES[i]} {p}"
            + (" + 10" if s < 0 else "")
            + f" - {q}"
            + (f" - {borrow}" if borrow else "")
            + f" = {s % 10}"
            + (" borrow 1" if s < 0 else "")
        )
        borrow = int(s < 0)
    return "; ".join(out) + "."


def _multiply_steps(a: int, b: int) -> str:
    big, small = (a, b) if b < 10 else (b, a)
    parts = [int(c) * 10 ** (len(str(big)) - 1 - i) for i, c in enumerate(str(big)) if c != "0"]
    out, total = [f"{p} * {small} = {p * small}" for p in parts], parts[0] * small
    for p in parts[1:]:
        out.append(f"{total} + {p * small} = {total + p * small}")
        total += p * small
    return ", ".join(out) + "."


def _divide_steps(a: int, b: int) -> str:
    tens, ones = a // b // 10 * 10, a // b % 10
    if not tens or not ones:
        return f"{b} * {tens + ones} = {a}."
    return f"{b} * {tens} = {b * tens}, {a} - {b * tens} = {b * ones}, {b} * {ones} = {b * ones}, {tens} + {ones} = {tens + ones}."


def work(a: int, op: str, b: int) -> str:
    """The steps of one sum, ending in its result."""
    v = compute(a, op, b)
    if op == "*" and a < 13 and b < 10:
        return f"{a} * {b} = {v}."
    steps = {"+": _add_steps, "-": _subtract_steps, "*": _multiply_steps, "/": _divide_steps}[op](a, b)
    return f"{a} {op} {b}: {steps} So {a} {op} {b} = {v}."


def sum_question(d: Dice) -> tuple[str, str, str]:
    """(question, answer, worked steps) without any tool."""
    op, top = (
        d.r.choices("+-*/", [0.4, 0.3, 0.2, 0.1])[0],
        10 ** d.r.choices([1, 2, 3, 4], [0.2, 0.45, 0.28, 0.07])[0],
    )
    a, b = d.whole(1, top - 1), d.whole(1, top - 1)
    if op == "-" and b > a:
        a, b = b, a
    if op == "*":
        a, b = (d.whole(2, 12), d.whole(2, 9)) if d.chance(0.6) else (d.whole(11, 99), d.whole(2, 9))
    if op == "/":
        b = d.whole(2, 12)
        a = b * d.whole(2, 99)
    v = compute(a, op, b)
    if d.chance(0.2) and op != "/":
        who, item = d.pick(d.words["proper"]), d.pick(_ITEMS)
        question, start, tail = {
            "+": (
                f"{who} has {a} {item} and gets {b} more. How many {item} does {who} have now?",
                f"{who} has",
                "",
            ),
            "-": (
                f"{who} has {a} {item} and gives away {b}. How many {item} are left?",
                "There are",
                " left",
            ),
            "*": (f"There are {a} boxes with {b} {item} each. How many {item} are there?", "There are", ""),
        }[op]
        return (
            question,
            d.pick([f"{start} {v} {item}{tail}.", f"The answer is {v}."]),
            f"This is {a} {op} {b}. " + work(a, op, b),
        )
    text = _spoken(d, a, op, b)
    question = d.pick(
        [
            f"What is {text}?",
            f"Calculate {text}.",
            f"{text} = ?",
            f"{text}?",
            f"How much is {text}?",
            f"Compute {text}",
            f"what's {text}",
            text,
        ]
    )
    return question, d.pick([f"{a} {op} {b} = {v}.", f"The answer is {v}."]), work(a, op, b)
