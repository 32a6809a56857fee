"""POST /v1/chat/completions: OpenAI's chat request to a Conversation.

Owns the request's fields and what of them is refused; the answer's shape is in `openai_chat_answer`.
Knows no template. Invariant: what can't be honoured is a 400, never silently another answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from freetoken.api.answer_format import only_one, read_extensions, read_format
from freetoken.api.body import decode
from freetoken.api.sampling import Sampling, out_of_range, refuse_fields
from freetoken.api.thoughts import check_effort, thinks_by_effort
from freetoken.api.tool_choice import ToolChoice, check_tool_choice, word_choice
from freetoken.chat.conversation import AnswerFormat, Conversation, Message, Tool, ToolCall
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams, Thinking

MAX_TOP_LOGPROBS = 20


class CallFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class CallIn(msgspec.Struct):
    function: CallFunction
    id: str | None = None


class MessageIn(msgspec.Struct):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[CallIn] | None = None
    tool_call_id: str | None = None
    function_call: CallFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionIn(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ThinkingIn(msgspec.Struct):
    """The switch as some services write it: {"type": "disabled"}."""

    type: Literal["enabled", "disabled", "auto", "adaptive"] = "auto"
    budget_tokens: int | None = None

    @property
    def switch(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ToolIn(msgspec.Struct):
    type: str = "function"
    function: FunctionIn | None = None


class ChatRequest(Sampling, kw_only=True):
    """The body. Fields typed Any are looked at only to refuse them."""

    messages: list[MessageIn]
    tools: list[ToolIn] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingIn | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    functions: Any = None
    audio: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    grammar: Any = None
    json_schema: Any = None
    continue_final_message: Any = None

    def to_conversation(self) -> Conversation:
        """Raises RequestError for content, tools and choices that can't be honoured."""
        self._refuse()
        if not self.messages:
            raise RequestError(
                "messages is empty.",
                code="empty_messages",
                hint="Send at least one message.",
                param="messages",
            )
        thinking, kwargs = self._thinking()
        tools = tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(self.tools or []))
        choice = check_tool_choice(self._tool_choice(), tools)
        return Conversation(
            messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(self.messages)),
            tools=tools,
            tool_choice=choice.kind,
            forced_tool=choice.name,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            thinking=thinking,
            think_budget=self.budget,
            template_kwargs=kwargs,
            answer_format=self._format(),
        )

    def generate_params(self) -> GenerateParams:
        """Raises RequestError for values out of range."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
            raise out_of_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
        if top and not self.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs.",
                code="missing_field",
                hint="Set logprobs to true.",
                param="logprobs",
            )
        if self.budget is not None and self.budget < 0:
            raise out_of_range("thinking_budget", self.budget, 0, 1 << 31)
        thinking = self._thinking()[0]
        word: Thinking | None = None if thinking is None else "on" if thinking else "off"
        return self.to_params(
            logprobs=(top or 0) if self.logprobs else None,
            thinking=word,
            thinking_budget=self.budget,
        )

    @property
    def budget(self) -> int | None:
        if self.thinking_budget is None and self.thinking is not None:
            return self.thinking.budget_tokens
        return self.thinking_budget

    def _refuse(self) -> None:
        refuse_fields({"functions": self.functions}, "tools took its place")
        refuse_fields({"audio": self.audio}, "this model writes text only")
        refuse_fields({"continue_final_message": self.continue_final_message}, "answers begin a new turn")
        if set(self.modalities or ["text"]) != {"text"}:
            refuse_fields({"modalities": self.modalities}, "this model writes text only")

    def _format(self) -> AnswerFormat | None:
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
        wishes = read_extensions({n: getattr(self, n) for n in (*names, "grammar", "json_schema")})
        return only_one(read_format(self.response_format, "response_format"), *wishes)

    def _tool_choice(self) -> ToolChoice:
        choice = self.tool_choice
        if isinstance(choice, dict):
            function = choice.get("function")
            return ToolChoice("named", str(function.get("name")) if isinstance(function, dict) else "")
        return word_choice(choice)

    def _thinking(self) -> tuple[bool | None, dict[str, Any]]:
        """Whether to think, from the field said most explicitly, and what is left for the template."""
        kwargs = dict(self.chat_template_kwargs or {})
        switch = kwargs.pop("enable_thinking", None)
        if switch is not None and not isinstance(switch, bool):
            raise RequestError(
                "chat_template_kwargs.enable_thinking must be true or false.",
                code="invalid_type",
                hint="Send a JSON boolean.",
                param="chat_template_kwargs.enable_thinking",
            )
        effort = check_effort(self.reasoning_effort, "reasoning_effort")
        if effort is not None:
            kwargs.setdefault("reasoning_effort", effort)
        if switch is None:
            switch = self.enable_thinking
        if switch is None and self.thinking is not None:
            switch = self.thinking.switch
        return thinks_by_effort(effort) if switch is None else switch, kwargs


_DECODER = msgspec.json.Decoder(ChatRequest)


def parse(body: bytes) -> ChatRequest:
    return decode(_DECODER, body)


def _message(message: MessageIn, where: str) -> Message:
    calls = [
        ToolCall(call.id or f"call_{i}", call.function.name, call.function.arguments or {})
        for i, call in enumerate(message.tool_calls or [])
    ]
    if message.function_call:
        calls.append(ToolCall("call_0", message.function_call.name, message.function_call.arguments or {}))
    return Message.make(
        message.role,
        message.content,
        where=where,
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool(tool: ToolIn, where: str) -> Tool:
    if tool.type != "function" or tool.function is None or not tool.function.name:
        raise RequestError(
            f"{where} is not a function with a name.",
            code="unsupported_tool",
            hint="Send tools as {type: function, function: {name, description, parameters}}.",
            param=where,
        )
    function = tool.function
    more = {} if function.parameters is None else {"parameters": function.parameters}
    return Tool(function.name, function.description or "", strict=bool(function.strict), **more)
