"""Agent sessions at the level of conversations: turns, and the edits that agents make between them."""

from __future__ import annotations

import random
from dataclasses import replace

from freetoken.bench._sessions import (
    Turns,
    clear_old_results,
    drop_middle,
    opening,
    step,
    strip_thinking,
    words,
)
from freetoken.chat.conversation import Conversation

__all__ = ["Turns", "conversation", "edited", "opening", "step", "words"]


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
