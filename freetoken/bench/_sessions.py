"""Agents' sessions, scripted: what is asked turn by turn, what is answered, and how histories are edited.

Owns the edits that agents make between turns (openclaw strips thoughts, opencode clears old tool results,
swe_agent keeps the last observations, claude_code runs sub-agents beside a main loop) and harder ones.
Texts are words drawn by a seed. Knows no tokens and no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall

_WORDS = "the a user asks tool file number what is define weather sum line error test run open close"
WORDS = tuple(_WORDS.split(" "))
PLACEHOLDER = "[Old tool result content cleared]"
Turns = tuple[Message, ...]
Rng = random.Random
Asks = Callable[[int, int], Iterator["Ask"]]


@dataclass(frozen=True)
class Ask:
    """One request: a conversation, the assistant turn that answers it, whose conversation it is."""

    conversation: Conversation
    said: Message
    group: str = "main"


@dataclass(frozen=True)
class Agent:
    """How an agent works. asks(base tokens, turns) yields its requests in order; edits: in words."""

    asks: Asks
    turns: int
    edits: str


def words(rng: Rng, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def opening(rng: Rng, size: int) -> Turns:
    return (Message("system", words(rng, size)), Message("user", words(rng, size // 4 + 3)))


def step(rng: Rng, number: int, size: int, *, thinks: bool = True) -> Turns:
    """The assistant thinks and calls a tool; the tool answers at length."""
    thought = words(rng, size) if thinks else ""
    call = ToolCall(f"call{number:04d}", "run", {"command": words(rng, 3)})
    said = Message("assistant", words(rng, 4), thought, (call,))
    return said, Message("tool", words(rng, size), tool_call_id=call.id, name="run")


def strip_thinking(turns: Turns, keep: int = 1) -> Turns:
    """Thoughts stay in the last `keep` assistant turns only."""
    spoken = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    old = spoken[: max(len(spoken) - keep, 0)]
    return tuple(replace(turn, reasoning="") if i in old else turn for i, turn in enumerate(turns))


def clear_old_results(turns: Turns, keep: int) -> Turns:
    """Tool results but the last `keep` become a placeholder."""
    results = [i for i, turn in enumerate(turns) if turn.role == "tool"]
    old = results[: max(len(results) - keep, 0)]
    return tuple(replace(turn, content=PLACEHOLDER) if i in old else turn for i, turn in enumerate(turns))


def drop_middle(turns: Turns, rng: Rng) -> Turns:
    """A turn and its result disappear."""
    at = [i for i, turn in enumerate(turns) if turn.role == "assistant" and i + 1 < len(turns)]
    if not at:
        return turns
    i = rng.choice(at)
    return turns[:i] + turns[i + 2 :]


def edit_inside(turns: Turns, rng: Rng) -> Turns:
    """Some words in the middle of a tool result that was sent before are others."""
    at = [i for i, turn in enumerate(turns) if turn.role == "tool"][:-1]
    if not at:
        return turns
    text = turns[at[-1]].content.split()
    half = len(text) // 2
    text[half : half + 3] = words(rng, 3).split()
    return (*turns[: at[-1]], replace(turns[at[-1]], content=" ".join(text)), *turns[at[-1] + 1 :])


def remind(turns: Turns, rng: Rng) -> Turns:
    """A reminder of the system is written at the head of the last user turn."""
    at = max(i for i, turn in enumerate(turns) if turn.role == "user")
    text = f"<system-reminder>{words(rng, 12)}</system-reminder>\n{turns[at].content}"
    return (*turns[:at], replace(turns[at], content=text), *turns[at + 1 :])


def compact(turns: Turns, rng: Rng) -> Turns:
    """All that was said becomes a summary behind the opening."""
    return (*turns[:2], Message("user", f"Summary of the conversation so far: {words(rng, 60)}"))


def _loop(seed: int, size: int, edit: Callable[[Turns, Rng], Turns], *, thinks: bool = True) -> Asks:
    """One main loop: every prompt is the history, edited."""

    def asks(base: int, turns: int) -> Iterator[Ask]:
        rng = Rng(seed)
        history = opening(rng, base)
        for i in range(turns):
            said = step(rng, i, size, thinks=thinks)
            yield Ask(Conversation(edit(history, rng)), said[0])
            history = (*history, *said)

    return asks


def _kept(seed: int, edit: Callable[[Turns, Rng], Turns], every: int) -> Asks:
    """A main loop whose history itself is edited, now and then."""

    def asks(base: int, turns: int) -> Iterator[Ask]:
        rng = Rng(seed)
        history = opening(rng, base)
        for i in range(turns):
            said = step(rng, i, 150)
            yield Ask(Conversation(history), said[0])
            history = (*history, *said)
            if i % every == every - 1:
                history = edit(history, rng)

    return asks


def _claude_code(base: int, turns: int) -> Iterator[Ask]:
    """A title call first; two sub-agents with a prompt of their own between the main loop's turns."""
    rng = Rng(3)
    main, helper = opening(rng, base), opening(rng, base // 3)
    yield Ask(Conversation(opening(rng, 300)), step(rng, 900, 5, thinks=False)[0], "title")
    for i in range(turns):
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={rng.randrange(1 << 20):05x};"
        nonce = Message("system", line)
        said = step(rng, i, 120)
        yield Ask(Conversation((nonce, *main)), said[0])
        main = (*main, *said)
        for k in range(2):
            task = (helper[0], opening(rng, 60)[1])
            for j in range(2):
                helped = step(rng, 1000 + 10 * i + 2 * k + j, 80)
                yield Ask(Conversation(task), helped[0], f"helper{k}")
                task = (*task, *helped)


def _reorders_tools(base: int, turns: int) -> Iterator[Ask]:
    """The tools come in another order every third turn."""
    rng = Rng(9)
    tools = [Tool(name, words(rng, 40)) for name in ("read", "write", "run", "find")]
    history = opening(rng, base)
    for i in range(turns):
        said = step(rng, i, 150)
        if i % 3 == 2:
            rng.shuffle(tools)
        yield Ask(Conversation(history, tuple(tools)), said[0])
        history = (*history, *said)


AGENTS: dict[str, Agent] = {
    "openclaw": Agent(
        _loop(1, 150, lambda t, _: strip_thinking(t)), 13, "strips thoughts but the last turn's"
    ),
    "opencode": Agent(
        _loop(2, 200, lambda t, _: clear_old_results(t, 6), thinks=False), 20, "clears tool results but 6"
    ),
    "swe-agent": Agent(
        _loop(4, 200, lambda t, _: clear_old_results(t, 5), thinks=False), 20, "keeps the last 5 observations"
    ),
    "claude-code": Agent(_claude_code, 8, "a title call, sub-agents beside the main loop, a nonce"),
}
HARDER: dict[str, Agent] = {
    "inside-edit": Agent(_kept(5, edit_inside, 2), 8, "other words in the middle of a result"),
    "reminder": Agent(_loop(6, 150, remind), 8, "a reminder at the head of the last user turn"),
    "tool-order": Agent(_reorders_tools, 8, "the tools in another order"),
    "dropped-turn": Agent(_kept(7, drop_middle, 2), 8, "a turn and its result disappear"),
    "compaction": Agent(_kept(8, compact, 4), 9, "the history becomes a summary"),
}
