"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's request to a Conversation.

Owns the request's fields; content blocks are read in `anthropic_content`, the answer's shape is in
`anthropic_answer`. Fields that only steer Anthropic's own service (betas, cache marks,
context management) mean nothing here and are ignored. `max_tokens` is a cap, as in that API: it is
lowered to what the context leaves.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from freetoken.api.answer_format import only_one, read_format
from freetoken.api.anthropic_content import Turn, read_tools, read_turns, system_turns
from freetoken.api.body import decode
from freetoken.api.sampling import MAX_STOPS, out_of_range, refuse_fields
from freetoken.api.sessions import SessionFields
from freetoken.api.tool_choice import ToolChoice, check_tool_choice
from freetoken.chat.conversation import AnswerFormat, Conversation
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams, Thinking

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 1 << 31),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, 1 << 31),
)


class ChoiceIn(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        words: dict[str, ToolChoice] = {"any": ToolChoice("required"), "none": ToolChoice("none")}
        if self.type == "tool":
            return ToolChoice("named", self.name or "")
        return words.get(self.type, ToolChoice("auto"))


class ThinkingIn(msgspec.Struct):
    """`display: "omitted"` keeps thoughts out of the answer; they travel inside the signature."""

    type: Literal["enabled", "disabled", "adaptive"] = "adaptive"
    budget_tokens: int | None = None
    display: str | None = None

    @property
    def switch(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputIn(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(SessionFields, kw_only=True):
    """What decides the prompt."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ChoiceIn | None = None
    thinking: ThinkingIn | None = None
    output_config: OutputIn | None = None
    output_format: dict[str, Any] | None = None

    def to_conversation(self) -> Conversation:
        """Raises RequestError for content, tools and choices that can't be honoured."""
        turns = read_turns(self.messages)
        if all(turn.role == "system" for turn in turns):
            raise RequestError(
                "messages: at least one message is required.",
                code="empty_messages",
                hint="Send at least one user message.",
                param="messages",
            )
        if turns[-1].role == "assistant":
            raise RequestError(
                "The conversation ends with an assistant message; answers begin a new turn here.",
                code="unsupported_prefill",
                hint="End with a user message.",
                param="messages",
            )
        asked = self.tool_choice or ChoiceIn()
        tools = read_tools(self.tools or [], self.messages)
        choice = check_tool_choice(asked.choice(), tools)
        return Conversation(
            messages=(*system_turns(self.system), *turns),
            tools=tools,
            tool_choice=choice.kind,
            forced_tool=choice.name,
            parallel_tool_calls=not asked.disable_parallel_tool_use,
            thinking=self.thinking.switch if self.thinking else None,
            think_budget=self.budget,
            template_kwargs={"reasoning_effort": self.effort} if self.effort else {},
            answer_format=self._format,
        )

    def thinking_params(self) -> GenerateParams:
        """What of the params decides the prompt."""
        switch = self.thinking.switch if self.thinking else None
        word: Thinking | None = None if switch is None else "on" if switch else "off"
        return GenerateParams(thinking=word, thinking_budget=self.budget)

    @property
    def budget(self) -> int | None:
        budget = self.thinking.budget_tokens if self.thinking and self.thinking.type == "enabled" else None
        if budget is not None and budget < 0:
            raise out_of_range("thinking.budget_tokens", budget, 0, 1 << 31)
        return budget

    @property
    def effort(self) -> str | None:
        return self.output_config.effort if self.output_config else None

    @property
    def _format(self) -> AnswerFormat | None:
        in_config = self.output_config.format if self.output_config else None
        return only_one(
            read_format(in_config, "output_config.format"), read_format(self.output_format, "output_format")
        )


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    mcp_servers: list[Any] | None = None

    def generate_params(self) -> GenerateParams:
        """Raises RequestError for values out of range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise out_of_range(name, value, low, high)
        stops = [text for text in self.stop_sequences or [] if text.strip()]
        if len(stops) > MAX_STOPS:
            raise out_of_range("the number of stop_sequences", len(stops), 0, MAX_STOPS)
        refuse_fields({"mcp_servers": self.mcp_servers}, "this server calls no tools itself")
        known = self.thinking_params()
        return GenerateParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            max_tokens=self.max_tokens,
            clip_max_tokens=True,
            stop=stops,
            thinking=known.thinking,
            thinking_budget=known.thinking_budget,
        )

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"


_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountRequest)


def parse(body: bytes) -> MessagesRequest:
    return decode(_MESSAGES, body)


def parse_count(body: bytes) -> CountRequest:
    return decode(_COUNT, body)
