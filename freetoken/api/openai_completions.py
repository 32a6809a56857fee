"""POST /v1/completions: raw text or token ids in, text out, in OpenAI's legacy shape.

Owns the four forms of `prompt`, echo and the legacy log probs; whole and streamed answers come from
the same events. Choice index = prompt number * n + choice number. Nothing is templated or parsed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from freetoken.api.body import decode
from freetoken.api.choices import Piece
from freetoken.api.face import Decoder, Prompt
from freetoken.api.openai_wire import UsageBody, finite, usage_body
from freetoken.api.sampling import MAX_CHOICES, Sampling, out_of_range, refuse_fields
from freetoken.api.sse import Renderer
from freetoken.chat.events import Finish, ReasoningDelta, TextDelta, TokenInfo, TokenLogprobs, Usage
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams

MAX_LOGPROBS = 20


class CompletionRequest(Sampling, kw_only=True):
    """The body. `prompt` is a string, a list of strings, a list of ids or a list of lists of ids."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    grammar: Any = None
    json_schema: Any = None

    def prompts(self) -> list[Prompt]:
        """Each prompt as text or int32 ids [n]; RequestError says which form was wrong."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given, list) and given:
            if all(_is_id(x) for x in given):
                return [np.array(given, np.int32)]
            if all(isinstance(x, str) for x in given):
                return list(given)
            if all(isinstance(x, list) and x and all(_is_id(i) for i in x) for x in given):
                return [np.array(x, np.int32) for x in given]
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists.",
            code="invalid_prompt",
            hint="Don't mix the forms, and leave no list empty.",
            param="prompt",
        )

    def generate_params(self) -> GenerateParams:
        """Raises RequestError for values out of range and fields that can't be honoured."""
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
        forms = {name: getattr(self, name) for name in (*names, "response_format", "grammar", "json_schema")}
        refuse_fields(forms, "the form of an answer is kept in chat completions only")
        refuse_fields({"suffix": self.suffix or None}, "this model completes at the end only")
        if self.best_of is not None and self.best_of != (self.n or 1):
            refuse_fields({"best_of": self.best_of}, "n answers are returned, none is ranked")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise out_of_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.echo and self.logprobs is not None:
            refuse_fields(
                {"echo": True}, "with logprobs it needs log probs of the prompt, which are not kept"
            )
        return self.to_params(logprobs=self.logprobs)

    def check_choices(self, num_prompts: int) -> int:
        """Return n; too many answers in one request are refused."""
        n = self.n or 1
        if n * num_prompts > MAX_CHOICES:
            raise out_of_range("prompts times n", n * num_prompts, 1, MAX_CHOICES)
        return n


_DECODER = msgspec.json.Decoder(CompletionRequest)


def parse(body: bytes) -> CompletionRequest:
    return decode(_DECODER, body)


def echo_text(prompt: Prompt, decoder: Decoder) -> str:
    return prompt if isinstance(prompt, str) else decoder.decode(prompt, skip_special=False)


class LegacyLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    text: str
    index: int
    logprobs: LegacyLogprobs | None
    finish_reason: str | None


class CompletionBody(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class _Part:
    """What one choice has gained: since the last chunk, or in all."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[TokenInfo] = []
        self.finish: str | None = None


class CompletionRenderer(Renderer):
    """Renders the answers of all prompts. `echoes[i]` is written in front of choice i's text."""

    def __init__(
        self, request_id: str, model: str, echoes: list[str], *, stream: bool, top: int | None, usage: bool
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._echoes = echoes
        self._is_stream = stream
        self._top = top
        self._wants_usage = usage
        self._offsets = [0] * len(echoes)
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)
        self._begun: set[int] = set()

    def feed(self, pieces: Iterable[Piece]) -> list[bytes]:
        for index, event in pieces:
            part = self._parts[index]
            if index not in self._begun:
                self._begun.add(index)
                part.text = self._echoes[index]
            if isinstance(event, (TextDelta, ReasoningDelta)):
                part.text += event.text
            elif isinstance(event, TokenLogprobs):
                part.tokens.extend(event.tokens)
            elif isinstance(event, Finish):
                part.finish = event.reason
        if not self._is_stream:
            return []
        frames = [self._body([self._choice(i, p)]) for i, p in self._parts.items() if _has_news(p, self._top)]
        self._parts.clear()
        return frames

    def tail(self, usage: Usage) -> list[bytes]:
        return [self._body([], usage)] if self._wants_usage else []

    def whole(self, usage: Usage) -> bytes:
        return self._body([self._choice(i, self._parts[i]) for i in range(len(self._echoes))], usage)

    def _choice(self, index: int, part: _Part) -> CompletionChoice:
        logprobs = self._legacy(index, part.tokens) if self._top is not None else None
        return CompletionChoice(part.text, index, logprobs, part.finish)

    def _legacy(self, index: int, tokens: list[TokenInfo]) -> LegacyLogprobs:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        tops = [{a.text: finite(a.logprob) for a in t.top} for t in tokens] if self._top else None
        return LegacyLogprobs([t.text for t in tokens], [finite(t.logprob) for t in tokens], tops, offsets)

    def _body(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        counts = usage_body(usage) if usage is not None else None
        body = CompletionBody(self._id, "text_completion", self._created, self._model, choices, counts)
        return msgspec.json.encode(body)


def _has_news(part: _Part, top: int | None) -> bool:
    return bool(part.text or part.finish or (part.tokens and top is not None))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
