"""POST /v1/responses: OpenAI's Responses request to a Conversation.

Owns the request's fields and what of them is refused; items are read in `openai_responses_items`, the
answer's shape is in `openai_responses_answer`. Nothing hosted exists here: no background runs, no
prompts, conversations or tools kept elsewhere. `max_output_tokens` is a cap, lowered to what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from freetoken.api.answer_format import read_format
from freetoken.api.body import decode
from freetoken.api.openai_responses_items import ToolNames, read_items
from freetoken.api.sampling import out_of_range, refuse_fields
from freetoken.api.sessions import SessionFields
from freetoken.api.thoughts import check_effort, thinks_by_effort
from freetoken.api.tool_choice import ToolChoice, check_tool_choice, word_choice
from freetoken.chat.conversation import Conversation, Message
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams, Thinking

MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("max_output_tokens", 1, 1 << 31),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS),
)


class ReasoningIn(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextIn(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SessionFields, kw_only=True):
    """The body. Fields typed Any are looked at only to refuse them."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningIn | None = None
    text: TextIn | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    def new_items(self) -> list[Any]:
        """What this request adds: a string is one user message."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return list(self.input or [])

    def to_conversation(self, items: Sequence[Any], names: ToolNames) -> Conversation:
        """Raises RequestError for items, tools and choices that can't be honoured.

        items  the whole conversation, oldest first
        names  of this request's tools
        """
        self._refuse()
        turns = read_items(items, names)
        if not turns:
            raise RequestError(
                "input is empty.",
                code="empty_messages",
                hint="Send a text or a list of items.",
                param="input",
            )
        choice = check_tool_choice(self._tool_choice(names), names.tools)
        effort = self.effort
        first = (Message("system", self.instructions),) if self.instructions else ()
        return Conversation(
            messages=(*first, *turns),
            tools=tuple(names.tools),
            tool_choice=choice.kind,
            forced_tool=choice.name,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking=thinks_by_effort(effort),
            template_kwargs={"reasoning_effort": effort} if effort else {},
            answer_format=read_format(self.text.format if self.text else None, "text.format"),
        )

    def generate_params(self) -> GenerateParams:
        """Raises RequestError for values out of range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise out_of_range(name, value, low, high)
        switch = thinks_by_effort(self.effort)
        word: Thinking | None = None if switch is None else "on" if switch else "off"
        return GenerateParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
            clip_max_tokens=True,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            thinking=word,
        )

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    @property
    def wants_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or [])

    @property
    def effort(self) -> str | None:
        return check_effort(self.reasoning.effort if self.reasoning else None, "reasoning.effort")

    def echo(self) -> dict[str, Any]:
        """The fields that a response repeats from its request."""
        effort, summary = (self.reasoning.effort, self.reasoning.summary) if self.reasoning else (None, None)
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": effort, "summary": summary},
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": (self.text.format if self.text else None) or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _refuse(self) -> None:
        refuse_fields({"background": self.background}, "answers are given while the client waits")
        refuse_fields({"conversation": self.conversation}, "send its items, or previous_response_id")
        refuse_fields({"prompt": self.prompt}, "no prompts are kept here")

    def _tool_choice(self, names: ToolNames) -> ToolChoice:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return word_choice(choice)
        kind = choice.get("type")
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            names.keep({names.flat(t.get("namespace"), str(t.get("name"))) for t in choice["tools"]})
            return word_choice(choice.get("mode"))
        if kind in ("function", "custom"):
            return ToolChoice("named", names.flat(choice.get("namespace"), str(choice.get("name"))))
        raise RequestError(
            f"tool_choice of type {kind!r} is not supported.",
            code="unsupported_tool_choice",
            hint="Use auto, none, required, or name a function.",
            param="tool_choice",
        )


_DECODER = msgspec.json.Decoder(ResponsesRequest)


def parse(body: bytes) -> ResponsesRequest:
    return decode(_DECODER, body)
