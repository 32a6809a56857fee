"""One turn of a chat: ask, show, run the tools that the model calls, ask again with the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from freetoken.chat.conversation import Conversation, Message, Tool, ToolCall, parse_arguments
from freetoken.chat.events import Answer
from freetoken.cli._session import Session
from freetoken.cli._terminal import Terminal, printable
from freetoken.cli._tools import run_tool
from freetoken.cli._view import AnswerView, Shown, figures, hit_rate
from freetoken.core.errors import ConfigError
from freetoken.core.generate import GenerateParams

MAX_ROUNDS = 6
_PRINTED = ("show", "fold", "hide")
_ALLOWED = ("on", "off", "auto")


class Turn:
    """How turns run in one sitting. `calls` counts the tool calls that were answered."""

    def __init__(self, session: Session, params: GenerateParams, out: Terminal, *, indent: str = "") -> None:
        self.session = session
        self.params = params
        self.out = out
        self.view = AnswerView(out, indent=indent)
        self.tools: Sequence[Tool] = ()
        self.calls = 0
        self.last = Shown()
        self._indent = indent

    def run(self, conversation: Conversation) -> list[Message]:
        """Answer `conversation`; returns its messages with the answer and tool results appended."""
        messages = list(conversation.messages)
        for _ in range(MAX_ROUNDS):
            shown = self._ask(replace(conversation, messages=tuple(messages), tools=tuple(self.tools)))
            messages.append(as_message(shown.answer))
            results = [] if shown.interrupted else self._results(shown.answer)
            if not results:
                break
            messages += results
        return messages

    def set_thinking(self, word: str) -> str:
        """Follow `/think WORD`; returns what is now so."""
        if word in _PRINTED:
            self.view.thinking = word
            return f"thinking is printed: {word}"
        if word not in _ALLOWED:
            raise ConfigError("/think takes on, off, auto, show, fold or hide.", code="usage")
        thinking: Any = word
        self.params = replace(self.params, thinking=thinking)
        return f"thinking: {word}"

    def _ask(self, conversation: Conversation) -> Shown:
        before = self.session.stats()
        shown = self.last = self.view.show(self.session.ask(conversation, self.params))
        line = figures(shown, hit_rate(before, self.session.stats()))
        self.out.line(self._indent + self.out.dim(line))
        return shown

    def _results(self, answer: Answer) -> list[Message]:
        out = []
        for call in answer.tool_calls:
            if not call.complete:
                continue
            text = run_tool(call.name, call.arguments)
            self.calls += 1
            self.out.line(self._indent + self.out.accent(f"<- {printable(text)}"))
            out.append(Message.make("tool", text, tool_call_id=call.id, name=call.name))
        return out


def as_message(answer: Answer) -> Message:
    """The assistant's turn as history; calls that broke off are dropped."""
    calls = [ToolCall(c.id, c.name, parse_arguments(c.arguments)) for c in answer.tool_calls if c.complete]
    return Message.make("assistant", answer.content, reasoning=answer.reasoning, tool_calls=calls)
