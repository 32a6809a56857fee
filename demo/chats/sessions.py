# ruff: noqa: E501 - sentences and small makers read best on one line
"""Puts tasks together into whole chats: single calls, several tools in one turn, chains, long sessions, and no call at all.

Owns the mixture. A Chat is what the shards tokenise; `learn` weights nothing, every assistant text is learnt.
"""

import json
import re
from dataclasses import dataclass

from demo.chats.calculating import add_list, calculator, sum_question
from demo.chats.coding import coding_session
from demo.chats.dice import Dice
from demo.chats.files import FILES, some_lines
from demo.chats.known import DAILY, clock, convert, mail, price, record, weather
from demo.chats.looking_up import LOOKUPS, define, unknown
from demo.chats.made_up import MadeUpTool
from demo.chats.talk import SYSTEM_PROMPTS, from_text, small_talk
from demo.chats.tasks import Task, listing, lower_first, spoken, upper_first

KNOWN = {**DAILY, **FILES, **LOOKUPS, calculator: 2.6, add_list: 0.6}
_KNOWS = re.compile(
    r"defin|dict|look|calc|math|add|subtract|multipl|divide|compute|eval|search|find|python|code|fact|wiki|info|sum|average|arith|encyc|country|query",
    re.I,
)
_ALIKE = {
    name: group
    for group, names in dict(
        know="define capital fact search page",
        sum="calculator add_list python",
        file="read shell folder grep write",
        shop="order_items record",
    ).items()
    for name in names.split()
}
MIXTURE = {
    "one": 18,
    "pair": 15,
    "triple": 4,
    "same": 7,
    "chain": 5,
    "no_call": 7,
    "turns": 17,
    "code": 14,
    "plain": 7,
    "sums": 8,
    "no_argument": 2,
    "no_tool": 2,
}
LONG_MIXTURE = {"turns": 40, "code": 45, "one": 5, "pair": 6, "plain": 2, "no_call": 2}


@dataclass
class Chat:
    messages: list[dict]
    tools: list[dict] | None
    thinking: bool


def any_task(d: Dice, taken: set[str] = frozenset()) -> Task:
    """A request for one call, of no kind in `taken`: made-up tools half of the time, a third of those nested."""
    if d.chance(0.55):
        return MadeUpTool(d, d.chance(0.33)).task()
    while True:
        maker = d.weighted(KNOWN)
        kind = _ALIKE.get(maker.__name__, maker.__name__)
        if kind not in taken:
            task = maker(d)
            task.kind = kind
            return task


def different(d: Dice, count: int) -> list[Task]:
    """Tasks of `count` different tools, no two of which could serve for each other."""
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        t = any_task(d, {x.kind for x in tasks.values()})
        tasks.setdefault(t.name, t)
    return list(tasks.values())


def with_others(d: Dice, needed: list[Task], extra: int) -> list[dict]:
    """The tools of the needed tasks once each among `extra` others, shuffled."""
    tools = {t.name: t.tool for t in reversed(needed)}
    taken = {t.kind for t in needed}
    for _ in range(extra):
        t = any_task(d, taken)
        tools.setdefault(t.name, t.tool)
    out = list(tools.values())
    d.r.shuffle(out)
    return out


def joined(d: Dice, queries: list[str]) -> str:
    """Several wishes as one message."""
    bare = [q.rstrip(".?! ") if not q.endswith('"') else q for q in queries]
    x = d.r.random()
    if x < 0.12:
        return d.pick(["", "Do these things:\n", "Please:\n"]) + "\n".join(
            f"{i}. {q}" for i, q in enumerate(queries, 1)
        )
    if x < 0.22:
        return "\n".join(queries)
    if x < 0.32:
        return (
            f"First {lower_first(bare[0])}. Then "
            + ". After that ".join(lower_first(b) for b in bare[1:])
            + "."
        )
    glue = d.pick([". Also ", " and ", ". Then also ", "; and ", ". And ", ". "])
    rest = [q if q.startswith("I ") or glue == ". " else lower_first(q) for q in bare[1:]]
    return glue.join([bare[0], *rest]) + d.pick([".", "", "?" if queries[-1].endswith("?") else "."])


def _thought(d: Dice, tasks: list[Task]) -> str:
    names = listing([t.name for t in tasks])
    why = " and to ".join(t.why for t in tasks)
    return d.pick(
        [
            f"The user wants to {why}. I will call {names}.",
            f"I need to {why}. I call {names}.",
            f"For this I use {names}.",
        ]
    )


def _say(answer: str, thinking: bool, thought: str) -> dict:
    return dict(role="assistant", content=answer, reasoning=thought if thinking else None)


def episode(d: Dice, tasks: list[Task], thinking: bool, request: str = "", finish: bool = True) -> list[dict]:
    """One request; all its calls in one turn; with finish=True the results and the answer."""
    calls = [(t.name, t.args) for t in tasks]
    words = (
        d.pick(["I'll do that.", "Let me check.", "Sure.", "One moment.", "Let me look that up."])
        if d.chance(0.08) and not thinking
        else ""
    )
    query = request or (tasks[0].query if len(tasks) == 1 else joined(d, [t.query for t in tasks]))
    messages = [
        dict(role="user", content=query),
        dict(
            role="assistant", content=words, calls=calls, reasoning=_thought(d, tasks) if thinking else None
        ),
    ]
    if finish:
        messages += [dict(role="tool", content=t.response) for t in tasks]
        messages.append(
            _say(
                " ".join(t.answer for t in tasks),
                thinking,
                d.pick(["The tool gave a result.", "I have the result.", "I can now answer the user."]),
            )
        )
    return messages


def same_tool(d: Dice) -> tuple[list[Task], str]:
    """Two or three calls of one tool, and a joint request where one sounds natural ("" = join the single ones)."""
    count = d.whole(2, 3)
    if d.chance(0.5):
        tool = MadeUpTool(d, d.chance(0.2))
        return [tool.task() for _ in range(count)], ""
    kind = d.pick([weather, clock, price, define, calculator, record])
    first = kind(d)
    while len(first.args) != 1:
        first = kind(d)
    first.kind = _ALIKE.get(kind.__name__, kind.__name__)
    tasks, key = [first], next(iter(first.args))
    shape = first.tool["function"]["description"] if kind is record else ""
    while len(tasks) < count:
        t = kind(d)
        if len(t.args) == 1 and (not shape or t.why.split()[2] == first.why.split()[2]):
            t.name, t.tool, t.args = first.name, first.tool, {key: next(iter(t.args.values()))}
            tasks.append(t)
    names = listing([str(t.args[key]) for t in tasks])
    joint = {
        weather: [f"What is the weather in {names}?", f"Compare the weather in {names}."],
        clock: [f"What time is it in {names}?", f"Tell me the time in {names}."],
        price: [f"Get the prices of {names}.", f"What are {names} worth?"],
        define: [f"Define {names}.", f"What do {names} mean?", f"Look up {names}."],
    }
    return tasks, d.pick(joint[kind]) if kind in joint and d.chance(0.7) else ""


def chain(d: Dice, thinking: bool) -> tuple[list[dict], list[Task]]:
    """The second call needs a value that the first one returns."""
    a, b = different(d, 2)
    for _ in range(60):
        if len(b.args) == 1 and isinstance(next(iter(b.args.values())), str) and a.name != b.name:
            break
        b = MadeUpTool(d).task()
    field, value = d.noun() + d.pick(["", "_id", "_code"]), d.ident() if d.chance(0.6) else d.word()
    b.args = {next(iter(b.args), "value"): value} if b.args else {}
    result = {field: value, **({d.noun(): d.number()} if d.chance(0.4) else {})}
    request = f"{a.query.rstrip('.?! ')}{d.pick([', then ', '. Then ', ' and then '])}{b.why} {d.pick(['with', 'for', 'using'])} the {spoken(field)} you get."
    first = episode(d, [a], thinking, request, False)
    second = dict(
        role="assistant",
        content="",
        calls=[(b.name, b.args)],
        reasoning=f"The {spoken(field)} is {value}. I call {b.name}." if thinking else None,
    )
    end = [dict(role="tool", content=b.response), _say(b.answer, thinking, "I have the result.")]
    return [*first, dict(role="tool", content=json.dumps(result, ensure_ascii=False)), second, *end], [a, b]


def plain_turn(d: Dice, thinking: bool, last: bool = True, kind: str = "") -> tuple[str, list[dict]]:
    """(kind, messages) of a turn that needs no tool. Sums are worked out where they can be seen."""
    kind = kind or d.weighted({"talk": 45, "sum": 20, "unknown": 17, "text": 18})
    question, answer, thought = {
        "talk": small_talk,
        "sum": sum_question,
        "unknown": unknown,
        "text": from_text,
    }[kind](d)
    if kind == "sum" and not (thinking and last) and len(thought) > 40:
        answer = thought if thought.rstrip(".").endswith(answer.rstrip(".")) else f"{thought} {answer}"
    return kind, [dict(role="user", content=question), _say(answer, thinking, thought)]


def unrelated(tools: list[dict]) -> list[dict]:
    """Those tools that nobody would try for a word, a sum or a fact."""
    return [t for t in tools if not _KNOWS.search(json.dumps(t))]


def turns(d: Dice, thinking: bool, count: int) -> tuple[list[dict], list[Task]]:
    """A session over one list of tools: calls, several calls, and talk between them."""
    pool = [MadeUpTool(d, d.chance(0.35)) for _ in range(d.whole(1, 3))]
    kinds, messages, tools = (
        d.r.sample([weather, calculator, define, convert, record, mail, clock], d.whole(0, 2)),
        [],
        [],
    )
    fixed = {k: k(d) for k in kinds}
    for k, t in fixed.items():
        t.kind = _ALIKE.get(k.__name__, k.__name__)
    for _ in range(count):
        x = d.r.random()
        if x < 0.2:
            kind, turn = plain_turn(d, thinking)
            if kind in ("talk", "text"):
                messages += turn
            continue
        tasks = [t.task() for t in d.r.sample(pool, min(len(pool), 2 if x < 0.45 else 1))]
        tasks = list({t.name: t for t in tasks}.values())
        if kinds and x > 0.7:
            tasks = [fixed.pop(kinds.pop())]
        messages += episode(d, tasks, thinking)
        tools += tasks
    return messages, tools


def _long_system(d: Dice) -> str:
    """The page-long instructions that real agents send."""
    parts = [d.pick(SYSTEM_PROMPTS)]
    for _ in range(d.whole(2, 20)):
        parts.append(
            d.pick(
                [
                    lambda: d.pick(d.paragraphs),
                    lambda: f"# {upper_first(d.phrase())}",
                    lambda: some_lines(d, 2, 8),
                ]
            )()
        )
    return "\n\n".join(parts)


class Chats:
    """Endless chats from one Dice. long=True makes sessions that fill thousands of tokens."""

    def __init__(self, d: Dice, long: bool = False) -> None:
        self.d, self.long = d, long

    def _extra(self) -> int:
        return self.d.r.choices([0, 1, 2, 3, 5], [0.3, 0.28, 0.22, 0.13, 0.07])[0]

    def sample(self) -> Chat:
        d = self.d
        thinking = d.chance(0.45)
        messages, tools = getattr(self, "_" + d.weighted(LONG_MIXTURE if self.long else MIXTURE))(thinking)
        tools = tools or None
        if self.long and d.chance(0.25):
            messages = [dict(role="system", content=_long_system(d)), *messages]
        elif d.chance(0.45 if tools else 0.3):
            messages = [dict(role="system", content=d.pick(SYSTEM_PROMPTS)), *messages]
        return Chat(messages, tools, thinking)

    def _one(self, thinking: bool):
        t = any_task(self.d)
        return episode(self.d, [t], thinking, finish=self.d.chance(0.75)), with_others(
            self.d, [t], self._extra()
        )

    def _several(self, thinking: bool, count: int):
        tasks = different(self.d, count)
        tools = with_others(self.d, tasks, self.d.pick([0, 0, 1, 2]))
        return episode(self.d, tasks, thinking, finish=self.d.chance(0.5)), tools

    def _pair(self, thinking: bool):
        return self._several(thinking, 2)

    def _triple(self, thinking: bool):
        return self._several(thinking, 3)

    def _same(self, thinking: bool):
        tasks, joint = same_tool(self.d)
        return episode(self.d, tasks, thinking, joint, self.d.chance(0.6)), with_others(
            self.d, tasks[:1], self._extra()
        )

    def _chain(self, thinking: bool):
        messages, needed = chain(self.d, thinking)
        return messages, with_others(self.d, needed, self.d.pick([0, 0, 1, 2]))

    def _turns(self, thinking: bool):
        d = self.d
        messages, needed = turns(d, thinking, d.whole(8, 50) if self.long else d.whole(3, 8))
        if not messages:
            return self._plain(thinking)
        return messages, with_others(d, needed, d.pick([0, 0, 1, 2])) if needed else None

    def _code(self, thinking: bool):
        d = self.d
        if not self.long:
            return coding_session(d, thinking, d.r.choices([1, 2, 3], [0.65, 0.25, 0.1])[0])
        return coding_session(
            d, thinking, d.whole(2, 16), d.r.choices([0, 2, 6, 20], [0.4, 0.3, 0.2, 0.1])[0]
        )

    def _no_call(self, thinking: bool):
        kind, messages = plain_turn(self.d, thinking)
        tools = with_others(self.d, [], self.d.whole(1, 4))
        return messages, tools if kind in ("talk", "text") else unrelated(tools)

    def _plain(self, thinking: bool):
        count = self.d.whole(1, 4)
        return [m for i in range(1, count + 1) for m in plain_turn(self.d, thinking, i == count)[1]], None

    def _sums(self, thinking: bool):
        count = 1 if thinking else self.d.whole(2, 8)
        return [m for _ in range(count) for m in plain_turn(self.d, thinking, True, "sum")[1]], None

    def _no_argument(self, thinking: bool):
        """The request leaves out what the tool needs, so the model asks."""
        d = self.d
        t = d.pick([weather, mail, record, convert])(d)
        missing = spoken(next(iter(t.tool["function"]["parameters"]["properties"])))
        request = d.pick(["I want to use {}.", "Please {}.", "{} please", "Can you {}?"]).format(
            spoken(t.name)
        )
        answer = d.pick(
            [f"Which {missing} should I use?", f"Please tell me the {missing}.", f"What is the {missing}?"]
        )
        return [
            dict(role="user", content=request),
            _say(answer, thinking, f"The {missing} is missing."),
        ], with_others(d, [t], d.pick([0, 1]))

    def _no_tool(self, thinking: bool):
        """None of the tools can do what the user wants."""
        d = self.d
        wanted = MadeUpTool(d).task()
        tools = [t for t in with_others(d, [], d.whole(1, 3)) if t["function"]["name"] != wanted.name]
        answer = d.pick(
            [
                "I don't have a tool for that.",
                "Sorry, none of my tools can do that.",
                f"I'm sorry, I have no tool to {wanted.why}.",
            ]
        )
        return [
            dict(role="user", content=wanted.query),
            _say(answer, thinking, "None of the tools fits."),
        ], tools
