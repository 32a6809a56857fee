"""What one chat template can take, found out by rendering small probes once.

Owns the differences between templates that no file declares: where a system turn may stand, whether
arguments of calls are objects or text, which token ends a turn. Turns a Conversation into the
messages that this template renders. Knows no tokenizer.

Late system turns: rendered in place if the template does so; else as a `<system>` block in front of
the next user turn (or behind the last one), which keeps the prompt's earlier part unchanged for the
prefix cache. A template without any system role gets the first one in front of the first user turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freetoken.chat.conversation import Conversation, Message, ToolCall, parse_arguments
from freetoken.chat.grammar import Think
from freetoken.chat.template import ChatTemplate
from freetoken.core.errors import RequestError

_WORD = "xqzprobe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class PromptForm:
    """A template's abilities, and the messages made to fit them.

    system_anywhere, system_first  where system turns are rendered, in their place in the order
    object_arguments, text_arguments  which forms of a call's arguments come out whole
    many_calls                        one turn may hold several
    words_beside_thoughts             a turn with calls may hold both
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        user, answer = Message("user", "Hi"), Message("assistant", "xqzanswer")
        note = Message("system", _WORD)
        self.system_first = _WORD in self._probe([note, user])
        late, mark, _ = self._probe([user, answer, note, user]).partition(_WORD)
        self.system_anywhere = self.system_first and bool(mark) and answer.content in late
        as_object = self._probe(self._call_probe({"k": _WORD}))
        self.object_arguments = _WORD in as_object and f"{{'k': '{_WORD}'}}" not in as_object
        self.text_arguments = _WORD in self._probe(self._call_probe(_WORD))
        calls = tuple(ToolCall(f"call1234{i}", f"f{_WORD}{i}", {}) for i in (1, 2))
        both = self._probe([user, Message("assistant", "", tool_calls=calls)])
        self.many_calls = calls[0].name not in both or calls[1].name in both
        thoughtful = Message("assistant", "words", "thoughts", calls[:1])
        can_call = calls[0].name in self._probe([user, Message("assistant", "words", tool_calls=calls[:1])])
        self.words_beside_thoughts = not can_call or calls[0].name in self._probe([user, thoughtful])

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The turns as dicts that the template renders; None marks an absent key."""
        turns = list(conversation.messages)
        if not self.system_anywhere:
            turns = self._fold_system(turns)
        if not self.many_calls:
            turns = _one_call_a_turn(turns)
        if not self.words_beside_thoughts:
            turns = [_words_as_thoughts(turn) for turn in turns]
        return [self._to_dict(turn) for turn in turns]

    def turn_end(self, control: Sequence[str]) -> str | None:
        """The control text that the template writes behind an answer, None if there is none."""
        rendered = self._probe([Message("user", "Hi"), Message("assistant", _WORD)], answer_next=False)
        rest = rendered.rpartition(_WORD)[2].lstrip() if _WORD in rendered else ""
        found = [text for text in control if rest.startswith(text)]
        return max(found, key=len, default=None)

    def _probe(self, turns: Sequence[Message], answer_next: bool = True) -> str:
        tools = [_PROBE_TOOL] if any(turn.tool_calls for turn in turns) else None
        messages = [self._to_dict(turn) for turn in turns] if tools is None else _raw_dicts(turns)
        try:
            return self._template.render(messages, tools, add_generation_prompt=answer_next)
        except RequestError:
            return ""

    def _call_probe(self, arguments: dict[str, Any] | str) -> list[Message]:
        call = ToolCall("call12345", "f", arguments)
        return [
            Message("user", "Hi"),
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", "done", tool_call_id=call.id, name="f"),
        ]

    def _fold_system(self, turns: list[Message]) -> list[Message]:
        """Move system turns where this template can say them."""
        num_first = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
        opening = "\n\n".join(turn.content for turn in turns[:num_first] if turn.content)
        folded: list[Message] = []
        notes: list[str] = []
        if opening and self.system_first:
            folded.append(Message("system", opening))
        elif opening:
            notes.append(opening)
        for turn in turns[num_first:]:
            if turn.role == "system":
                notes += [f"<system>\n{turn.content}\n</system>"] if turn.content else []
            elif turn.role == "user" and notes:
                folded.append(_with(turn, "\n\n".join([*notes, turn.content])))
                notes = []
            else:
                if turn.role == "assistant":
                    notes = _behind_last_user(folded, notes)
                folded.append(turn)
        if notes := _behind_last_user(folded, notes):
            folded.append(Message("user", "\n\n".join(notes)))
        return folded

    def _to_dict(self, turn: Message) -> dict[str, Any]:
        return {
            "role": turn.role,
            "content": turn.content,
            "reasoning_content": turn.reasoning or None,
            "reasoning": turn.reasoning or None,
            "thinking": turn.reasoning or None,
            "tool_calls": [self._call_dict(call) for call in turn.tool_calls] or None,
            "tool_call_id": turn.tool_call_id,
            "name": turn.name,
        }

    def _call_dict(self, call: ToolCall) -> dict[str, Any]:
        arguments = parse_arguments(call.arguments)
        if isinstance(arguments, Mapping) and not self.object_arguments and self.text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self.text_arguments:
            arguments = {"arguments": arguments}
        return _function(call.id, call.name, arguments)


def _raw_dicts(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Dicts for probes of calls: their arguments exactly as given."""
    return [
        {
            "role": turn.role,
            "content": turn.content,
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), turn.reasoning or None),
            "tool_calls": [_function(c.id, c.name, c.arguments) for c in turn.tool_calls] or None,
            "tool_call_id": turn.tool_call_id,
            "name": turn.name,
        }
        for turn in turns
    ]


def _function(id_: str, name: str, arguments: object) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _one_call_a_turn(turns: list[Message]) -> list[Message]:
    """Split turns of several calls, each followed by its own result where there is one."""
    out: list[Message] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        if len(turn.tool_calls) < 2:
            out.append(turn)
            continue
        results = []
        while at < len(turns) and turns[at].role == "tool":
            results.append(turns[at])
            at += 1
        for i, call in enumerate(turn.tool_calls):
            first = (turn.content, turn.reasoning) if i == 0 else ("", "")
            out.append(Message("assistant", *first, (call,)))
            own = [r for r in results if r.tool_call_id == call.id] or results[:1]
            out += own[:1]
            results = [r for r in results if r is not (own[0] if own else None)]
        out += results
    return out


def _words_as_thoughts(turn: Message) -> Message:
    """Words that stand before a call, joined with the thoughts before them."""
    if not (turn.tool_calls and turn.content and turn.reasoning):
        return turn
    return replace(turn, content="", reasoning=f"{turn.reasoning}\n\n{turn.content}")


def _behind_last_user(folded: list[Message], notes: list[str]) -> list[str]:
    """Put notes behind the user turn that comes last, if one does; return the notes that are left."""
    if not notes or not folded or folded[-1].role != "user":
        return notes
    folded[-1] = _with(folded[-1], "\n\n".join([folded[-1].content, *notes]))
    return []


def _with(turn: Message, content: str) -> Message:
    return Message(turn.role, content, name=turn.name)


def split_thoughts(turn: Message, think: Think | None) -> Message:
    """Move thoughts that a client left in an assistant turn's content to where they belong."""
    if think is None or not think.inline or turn.role != "assistant" or turn.reasoning:
        return turn
    if think.close not in turn.content:
        return turn
    opened, closed = re.escape(think.open), re.escape(think.close)
    found = re.match(rf"\s*(?:{opened})?(.*?){closed}\s*", turn.content, re.DOTALL)
    assert found is not None
    rest = turn.content[found.end() :]
    return Message(turn.role, rest, found[1].strip("\r\n"), turn.tool_calls, turn.tool_call_id, turn.name)
