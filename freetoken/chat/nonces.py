"""Lines that a client writes for its maker and changes with every request.

They mean nothing to a model and stand at the very beginning, where one changed token costs the whole
prefix cache. Drops exactly the known ones, and only as leading lines of system turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freetoken.chat.conversation import Message

NONCE_LINES = ("x-anthropic-billing-header:",)


def without_nonces(turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns without such lines; a system turn that held nothing else goes."""
    kept = []
    for turn in turns:
        if turn.role == "system" and turn.content.startswith(NONCE_LINES):
            rest = turn.content
            while rest.startswith(NONCE_LINES):
                rest = rest.partition("\n")[2]
            if not rest:
                continue
            turn = replace(turn, content=rest)
        kept.append(turn)
    return tuple(kept)
