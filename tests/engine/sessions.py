"""Agent sessions at the level of conversations: turns, and the edits that agents make between them."""

from __future__ import annotations

import random
from dataclasses import replace

from freetoken.chat.conversation import Conversation, Message, ToolCall

WORDS = [
    "the",
    "a",
    "user",
    "asks",
    "tool",
    "file",
    "number",
    "what",
    "is",
    "define",
    "weather",
    "sum",
    "line",
    "error",
    "test",
    "run",
    "open",
    "close",
]
PLACEHOLDER = "[Old tool result content cleared]"
Turns = tuple[Message, ...]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def opening(rng: random.Random, size: int) -> Turns:
    return (Message("system", words(rng, size)), Message("user", words(rng, size // 4 + 3)))


def step(rng: random.Random, number: int, size: int, *, thinks: bool = True) -> Turns:
    """The assistant thinks and calls a tool; the tool answers at length."""
    thought = words(rng, size) if thinks else ""
    call = ToolCall(f"call{number:04d}", "run", {"command": words(rng, 3)})
    said = Message("assistant", words(rng, 4), thought, (call,))
    return said, Message("tool", words(rng, size), tool_call_id=call.id, name="run")


def strip_thinking(turns: Turns, keep: int = 1) -> Turns:
    """OpenClaw: thoughts stay in the last `keep` assistant turns only."""
    spoken = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    old = spoken[: max(len(spoken) - keep, 0)]
    return tuple(replace(turn, reasoning="") if i in old else turn for i, turn in enumerate(turns))


def clear_old_results(turns: Turns, keep: int) -> Turns:
    """OpenCode, SWE-agent: tool results but the last `keep` become a placeholder."""
    results = [i for i, turn in enumerate(turns) if turn.role == "tool"]
    old = results[: max(len(results) - keep, 0)]
    return tuple(replace(turn, content=PLACEHOLDER) if i in old else turn for i, turn in enumerate(turns))


def drop_middle(turns: Turns, rng: random.Random) -> Turns:
    """A turn and its result disappear."""
    at = [i for i, turn in enumerate(turns) if turn.role == "assistant" and i + 1 < len(turns)]
    if not at:
        return turns
    i = rng.choice(at)
    return turns[:i] + turns[i + 2 :]


def replace_result(turns: Turns, rng: random.Random) -> Turns:
    at = [i for i, turn in enumerate(turns) if turn.role == "tool"]
    if not at:
        return turns
    i = rng.choice(at)
    return (*turns[:i], replace(turns[i], content=words(rng, 9)), *turns[i + 1 :])


def edited(turns: Turns, rng: random.Random) -> Turns:
    """One random edit of the kinds above, or none."""
    kind = rng.randrange(6)
    if kind == 0:
        return strip_thinking(turns)
    if kind == 1:
        return clear_old_results(turns, rng.randrange(3))
    if kind == 2:
        return drop_middle(turns, rng)
    if kind == 3:
        return replace_result(turns, rng)
    return turns


def conversation(turns: Turns) -> Conversation:
    return Conversation(turns)
