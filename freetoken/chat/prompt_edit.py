"""What was done to a prompt since an earlier one: where the first other token lies, and the likely cause.

Compares two prompts by their token ids and by checksums of their turns, so the earlier one's text need not be
kept. Knows no cache and no engine. The causes are guesses for people; nothing depends on them.

    new               nothing like it was asked before
    nonce             a few tokens of the system turn differ and the rest goes on as before
    tools_reordered   the same tools in another order            tools_changed  other tools
    text_changed      a turn has another text                    thinking_dropped  a thought is gone
    turns_dropped     a turn that was there is missing           turns_inserted    a new one stands in between
    answer_rewritten  the model's own answer came back in other words, or another form
    template_drift    the same turns, rendered otherwise
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from freetoken.chat.conversation import Conversation, Message, Tool
from freetoken.chat.tokenizer import IntArray
from freetoken.core.prefix import num_common

MIN_ALIKE = 32
"""Prompts with fewer tokens in common have nothing to do with each other, unless their turns say so."""
MAX_NONCE = 64
_REALIGNED = 24


@dataclass(frozen=True)
class TurnMark:
    """Checksums of one turn: what was said, and what was thought (0: nothing)."""

    role: str
    text: int
    thought: int


@dataclass(frozen=True)
class ToolMark:
    name: str
    digest: int


@dataclass
class Asked:
    """One prompt that was run.

    ids         int32 [n]  the prompt, then its answer once it is known (it may come at any time)
    num_prompt  tokens of the prompt
    in_thought  the prompt ends inside a thought
    """

    session: str
    ids: IntArray
    num_prompt: int
    turns: tuple[TurnMark, ...] = ()
    tools: tuple[ToolMark, ...] = ()
    in_thought: bool = False


@dataclass(frozen=True)
class Place:
    """A place in a rendered prompt. turn: index into the turns, -1 = ahead of the first turn's text."""

    turn: int
    text: str


@dataclass(frozen=True)
class Edit:
    """shared: tokens in common with the earlier prompt and its answer. cause "": nothing was changed."""

    shared: int = 0
    cause: str = "new"
    where: str = ""


def marks_of(conversation: Conversation) -> tuple[tuple[TurnMark, ...], tuple[ToolMark, ...]]:
    """Checksums of the turns and of the tools on offer."""
    turns = tuple(_turn_mark(turn) for turn in conversation.messages)
    return turns, tuple(_tool_mark(tool) for tool in conversation.offered_tools)


def nearest(asked: Asked, earlier: Sequence[Asked]) -> tuple[Asked | None, int]:
    """The earlier prompt that `asked` has most in common with (the latest of equals), and how many tokens."""
    best: Asked | None = None
    most, prompt = 0, asked.ids[: asked.num_prompt - 1]
    for old in earlier:
        if (shared := num_common(old.ids, prompt)) >= max(most, MIN_ALIKE):
            best, most = old, shared
    if best is not None:
        return best, most
    turns = set(asked.turns)
    alike = [old for old in earlier if turns.intersection(old.turns) or (old.session == asked.session != "")]
    best = max(alike, key=lambda old: len(turns.intersection(old.turns)), default=None)
    return best, num_common(best.ids, prompt) if best is not None else 0


def find_edit(asked: Asked, earlier: Sequence[Asked], place_of: Callable[[int], Place]) -> Edit:
    """What was changed since the earlier prompt that is most like this one.

    place_of  says where in the new prompt a token lies; called only if something was changed
    """
    old, shared = nearest(asked, earlier)
    if old is None:
        return Edit()
    if shared >= min(len(old.ids), asked.num_prompt - 1):
        return Edit(shared, "")
    place = place_of(shared)
    cause = cause_of(asked, old, shared, place)
    return Edit(shared, cause, "tools" if cause.startswith("tools") else place.text)


def cause_of(new: Asked, old: Asked, shared: int, place: Place) -> str:
    """Guess what was done at `place`, the first one where the two differ."""
    i = place.turn
    if new.tools != old.tools and i <= 0:
        same = sorted(new.tools, key=_by_name) == sorted(old.tools, key=_by_name)
        return "tools_reordered" if same else "tools_changed"
    if i < 0 or i >= len(new.turns):
        return _nonce_or("template_drift" if new.turns else "text_changed", new, old, shared)
    turn = new.turns[i]
    if i >= len(old.turns):
        return _in_answer(turn, old, shared)
    before = old.turns[i]
    if turn == before:
        return "template_drift"
    if (turn.role, turn.text) == (before.role, before.text):
        return "thinking_dropped" if not turn.thought else "text_changed"
    if turn in old.turns[i + 1 :]:
        return "turns_dropped"
    if before in new.turns[i + 1 :]:
        return "turns_inserted"
    if turn.role != before.role:
        return "turns_dropped" if len(new.turns) < len(old.turns) else "turns_inserted"
    return _nonce_or("text_changed", new, old, shared) if turn.role == "system" else "text_changed"


def _in_answer(turn: TurnMark, old: Asked, shared: int) -> str:
    """The first difference lies in what the model said, or in the tail that asked for it."""
    if turn.role != "assistant":
        return "turns_dropped"
    if old.in_thought and not turn.thought:
        return "thinking_dropped"
    return "answer_rewritten" if shared >= old.num_prompt else "template_drift"


def _nonce_or(cause: str, new: Asked, old: Asked, shared: int) -> str:
    """`nonce` if at most a few tokens differ before both go on alike."""
    a, b = (_windows(ids[shared : shared + MAX_NONCE + _REALIGNED]) for ids in (old.ids, new.ids))
    if not len(a) or not len(b):
        return cause
    return "nonce" if bool((a[1:, None] == b[None, 1:]).all(-1).any()) else cause


def _windows(ids: IntArray) -> IntArray:
    """int32 [m, 24]: each run of 24 ids."""
    if len(ids) < _REALIGNED:
        return np.empty((0, _REALIGNED), np.int32)
    return np.lib.stride_tricks.sliding_window_view(ids, _REALIGNED)


def _by_name(tool: ToolMark) -> tuple[str, int]:
    return tool.name, tool.digest


def _turn_mark(turn: Message) -> TurnMark:
    calls = [(call.name, call.arguments) for call in turn.tool_calls]
    said = f"{turn.content}\0{calls}"
    return TurnMark(turn.role, _digest(said), _digest(turn.reasoning) if turn.reasoning else 0)


def _tool_mark(tool: Tool) -> ToolMark:
    return ToolMark(tool.name, _digest(json.dumps(tool.to_template(), sort_keys=True, default=str)))


def _digest(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace")) + 1
