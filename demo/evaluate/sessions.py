# ruff: noqa: E501 - sentences and small makers read best on one line
"""Held-out sessions of several replies: a coding agent in a pretend project, and a calculator to the final answer.

The model's own calls are carried out, so one wrong step can cost the session, as in life.
"""

import json
import re

from demo.chats.bugs import problem
from demo.chats.calculating import calculator, compute
from demo.chats.coding import Session
from demo.chats.dice import Dice
from demo.chats.sessions import with_others
from demo.evaluate.decoder import Decoder, prompt_of, to_message

_STEPS = 8


def _last_user(messages: list[dict]) -> int:
    return max(i for i, m in enumerate(messages) if m["role"] == "user")


class _Run:
    """One coding session under way: the first request stays, the model's replies and the tools' answers follow."""

    def __init__(self, d: Dice, thinking: bool) -> None:
        self.session = Session(d, thinking)
        while True:
            p = problem(d, d.pick([0, 0, 1, 2]) if self.session.changer == "edit" else 0)
            shape = self.session.test_first if self.session.tester and d.chance(0.25) else self.session.solve
            self.messages = shape(p)[:1]
            break
        self.thinking, self.workspace, self.done = thinking, self.session.workspace(p), False

    @property
    def prompt(self) -> str:
        return prompt_of(self.messages, self.session.box.tools, self.thinking)

    def take(self, text: str) -> None:
        message = to_message(text, self.thinking)
        self.messages.append(message)
        for name, args in message["calls"]:
            self.messages.append(dict(role="tool", content=self.workspace.run(name, args)))
        self.done = not message["calls"]

    @property
    def right(self) -> bool:
        return self.done and self.workspace.solved and (self.workspace.tested or not self.session.tester)


def coding(decoder: Decoder, d: Dice, count: int) -> dict[str, object]:
    """Share of sessions that end with the file right, the tests run where there are any, and an answer."""
    runs = [_Run(d, i % 2 == 1) for i in range(count)]
    for _ in range(_STEPS):
        going = [r for r in runs if not r.done]
        for r, text in zip(going, decoder.reply([r.prompt for r in going]) if going else [], strict=True):
            r.take(text)
    wrong = [dict(messages=r.messages, wanted=r.workspace.wanted) for r in runs if not r.right]
    return dict(
        n=count,
        right=round(sum(r.right for r in runs) / count, 3),
        ended=round(sum(r.done for r in runs) / count, 3),
        wrong=wrong[:6],
    )


def _result(call: tuple[str, dict[str, str]]) -> int | float | None:
    """What a calculator of any schema would answer."""
    words = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
    text = " ".join(call[1].values())
    found = re.search(r"(-?\d+) ([-+*/]) (-?\d+)", text)
    if found:
        return compute(int(found[1]), found[2], int(found[3]))
    numbers = re.findall(r"(?<![\w.])-?\d+(?![\w.])", text)
    op = next((s for w, s in words.items() if w in f"{text} {call[0].lower()}"), None)
    return compute(int(numbers[0]), op, int(numbers[1])) if op and len(numbers) == 2 else None


def calculating(decoder: Decoder, d: Dice, count: int) -> dict[str, object]:
    """A sum through a calculator tool, to the number in the final answer."""
    tasks = [calculator(d) for _ in range(count)]
    for t in tasks:
        t.kind = "sum"
    runs = [
        ([dict(role="user", content=t.query)], with_others(d, [t], d.pick([0, 1, 2])), i % 2 == 1)
        for i, t in enumerate(tasks)
    ]
    replies = decoder.reply([prompt_of(*r) for r in runs])
    going = []
    for t, (messages, tools, thinking), text in zip(tasks, runs, replies, strict=True):
        message = to_message(text, thinking)
        value = (
            _result(message["calls"][0])
            if len(message["calls"]) == 1 and message["calls"][0][0] == t.name
            else None
        )
        if value is not None:
            going.append(
                (
                    t,
                    [*messages, message, dict(role="tool", content=json.dumps({"result": value}))],
                    tools,
                    thinking,
                )
            )
    answers = decoder.reply([prompt_of(*g[1:]) for g in going], 60)
    truth = [re.findall(r"-?\d+", re.sub(r'"status".*', "", t.response))[0] for t, *_ in going]
    right = [
        bool(re.search(rf"(?<!\d){re.escape(v)}(?!\d)", a.split("</think>")[-1]))
        for v, a in zip(truth, answers, strict=True)
    ]
    return dict(n=count, called=len(going), right=round(sum(right) / count, 3))
