"""The fields by which every OpenAI-style request says how to draw tokens, with their ranges.

Owns checks and conversion to GenerateParams; knows no prompt. Out of range is an error with code
`out_of_range` and the field as `param`, never a silent clamp. `None` = the server's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from freetoken.api.sessions import SessionFields
from freetoken.core.errors import RequestError
from freetoken.core.generate import GenerateParams

MAX_CHOICES = 64
MAX_STOPS = 16
_INT64 = 1 << 63
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, 1 << 31),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 10),
    ("seed", -_INT64, _INT64 - 1),
    ("max_tokens", 1, 1 << 31),
    ("max_completion_tokens", 1, 1 << 31),
    ("n", 1, MAX_CHOICES),
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Sampling(SessionFields, kw_only=True):
    """Fields that chat and text completions share, as they come."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise RequestError for the first value out of its range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise out_of_range(name, value, low, high)
        for token_id, bias in (self.logit_bias or {}).items():
            if not 0 <= token_id < 1 << 31:
                raise out_of_range("a token id in logit_bias", token_id, 0, 1 << 31, param="logit_bias")
            if not -100 <= bias <= 100:
                raise out_of_range("a bias in logit_bias", bias, -100, 100, param="logit_bias")
        for token_id in self.stop_token_ids or []:
            if not 0 <= token_id < 1 << 31:
                raise out_of_range("stop_token_ids", token_id, 0, 1 << 31)
        if len(self.stop_list) > MAX_STOPS or not all(self.stop_list):
            raise RequestError(
                f"stop must be one to {MAX_STOPS} non-empty strings.",
                code="out_of_range",
                hint="Drop the empty or surplus ones.",
                param="stop",
            )

    @property
    def stop_list(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def to_params(self, **more: Any) -> GenerateParams:
        """Check everything and build the params; `more` are the protocol's own fields."""
        self.check()
        return GenerateParams(
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop_list,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            **more,
        )


def for_choice(params: GenerateParams, index: int) -> GenerateParams:
    """Params of choice `index`: a given seed is shifted, so that n choices differ yet repeat."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index + _INT64) % (2 * _INT64) - _INT64)


def out_of_range(name: str, value: object, low: float, high: float, param: str = "") -> RequestError:
    top = f"between {low:g} and {high:g}" if high < 1 << 31 else f"at least {low:g}"
    return RequestError(
        f"{name} is {value}, it must be {top}.",
        code="out_of_range",
        hint="Change it or leave it out.",
        param=param or name,
    )


def refuse_fields(fields: Mapping[str, object], why: str) -> None:
    """Refuse fields that would change the answer's meaning and aren't supported; null is fine."""
    for name, value in fields.items():
        if value is not None and value is not False and value != [] and value != {}:
            raise RequestError(
                f"{name} is not supported: {why}.",
                code="unsupported_parameter",
                hint="Leave it out.",
                param=name,
            )
