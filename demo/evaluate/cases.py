# ruff: noqa: E501, E731 - sentences and small makers read best on one line
"""Held-out cases that one reply decides: which calls it makes, or what it says.

A Case knows its prompt and whether a reply is right. All words, names and values are drawn from those that training never used.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from demo.chats.calculating import sum_question
from demo.chats.dice import Dice
from demo.chats.looking_up import define, unknown
from demo.chats.made_up import MadeUpTool
from demo.chats.sessions import any_task, different, episode, plain_turn, same_tool, unrelated, with_others
from demo.chats.tasks import Task
from demo.evaluate.decoder import as_written, prompt_of, read_calls

_DOES_NOT_KNOW = re.compile(r"don't know|can't define|too small to know|more than I know", re.I)


@dataclass
class Case:
    kind: str
    prompt: str
    right: Callable[[str], bool]
    wanted: object
    thinking: bool


def _calling(d: Dice, kind: str, tasks: list[Task], thinking: bool, others: int, request: str = "") -> Case:
    tools = with_others(d, tasks, others)
    wanted = as_written([(t.name, t.args) for t in tasks])
    prompt = prompt_of(episode(d, tasks, thinking, request, False)[:1], tools, thinking)
    return Case(kind, prompt, lambda y: read_calls(y) == wanted, wanted, thinking)


def _known(d: Dice) -> Task:
    while True:
        task = any_task(d)
        if task.kind:
            return task


def _no_call(d: Dice, thinking: bool) -> Case:
    kind, messages = plain_turn(d, thinking)
    tools = with_others(d, [], d.whole(1, 3))
    tools = tools if kind in ("talk", "text") else unrelated(tools)
    return Case(
        "no_call",
        prompt_of(messages[:1], tools, thinking),
        lambda y: "<tool_call>" not in y,
        "no call",
        thinking,
    )


def _refusal(d: Dice, thinking: bool) -> Case:
    question, answer, _ = unknown(d)
    return Case(
        "says_it_does_not_know",
        prompt_of([dict(role="user", content=question)], None, thinking),
        lambda y: bool(_DOES_NOT_KNOW.search(y)),
        answer,
        thinking,
    )


def _sum(d: Dice, thinking: bool) -> Case:
    question, _, work = sum_question(d)
    value = re.search(r"= (-?\d+)\.?$", work).group(1)
    right = lambda y: (
        re.findall(r"-?\d+", y.rsplit("</think>")[-1].split("So ")[-1])[-1:] == [value]
        or bool(re.search(rf"(?<!\d){value}(?!\d)", y.rsplit("</think>")[-1].split("So ")[-1]))
    )
    return Case(
        "sum_thinking" if thinking else "sum_at_once",
        prompt_of([dict(role="user", content=question)], None, thinking),
        right,
        value,
        thinking,
    )


def _answering(d: Dice, thinking: bool) -> Case:
    """A dictionary has answered; the reply must carry the definition, or say that there is none."""
    t = define(d)
    while "could not find" in t.answer or "no entry" in t.answer:
        t = define(d)
    gloss = next(x[2] for x in d.definitions if x[2] in t.answer and x[0] == next(iter(t.args.values())))
    messages = episode(d, [t], thinking)[:-1]
    return Case(
        "dictionary_answer", prompt_of(messages, [t.tool], thinking), lambda y: gloss in y, gloss, thinking
    )


def one_reply_cases(d: Dice, count: int) -> list[Case]:
    """`count` cases of each kind, every second one with thinking."""
    out: list[Case] = []
    for i in range(count):
        thinking = i % 2 == 1
        others = d.r.choices([0, 1, 2, 3, 5], [0.3, 0.25, 0.22, 0.15, 0.08])[0]
        out.append(_calling(d, "made_up_tool", [MadeUpTool(d).task()], thinking, others))
        out.append(_calling(d, "nested_arguments", [MadeUpTool(d, True).task()], thinking, others))
        out.append(_calling(d, "known_tool", [_known(d)], thinking, others))
        out.append(_calling(d, "two_different_tools", different(d, 2), thinking, d.pick([0, 0, 1, 2])))
        if i % 2 == 0:
            thinking = i % 4 == 2
            tasks, joint = same_tool(d)
            out.append(_calling(d, "one_tool_several_times", tasks, thinking, others, joint))
            out.append(_calling(d, "three_different_tools", different(d, 3), thinking, 0))
            out += [_refusal(d, thinking), _answering(d, thinking)]
        out += [_no_call(d, thinking), _sum(d, thinking)]
    return out
