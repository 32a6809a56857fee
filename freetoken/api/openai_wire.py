"""Shapes that chat and text completions of OpenAI's API share on the way out: usage and log probs.

Structs only and their filling; field order is the order on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from freetoken.chat.events import TokenInfo, Usage


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptDetails(usage.cached_tokens),
        CompletionDetails(usage.reasoning_tokens),
    )


def chat_logprobs(tokens: Iterable[TokenInfo]) -> ChatLogprobs:
    """One entry a drawn token, thoughts and calls included, so that the count equals the usage's."""
    entries = [
        TokenLogprob(
            t.text,
            finite(t.logprob),
            list(t.bytes),
            [TopLogprob(a.text, finite(a.logprob), list(a.bytes)) for a in t.top],
        )
        for t in tokens
    ]
    return ChatLogprobs(entries)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be drawn."""
    return max(logprob, -9999.0)
