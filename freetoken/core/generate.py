"""What a caller may wish of one answer, and whether the model can answer at all. Plain values.

The words of users (thinking, stop strings), not of the sampler: `llm` turns GenerateParams into
SamplingParams with the model's defaults and token ids. `None` always means: the server decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from freetoken.core.errors import FreeTokenError

Thinking = Literal["auto", "on", "off"]
State = Literal["loading", "ok", "failed"]


@dataclass(frozen=True, kw_only=True)
class GenerateParams:
    """One answer's wishes; ranges are checked by whoever builds it (an API, the CLI).

    temperature         0 is greedy
    top_k               0 is off
    logit_bias          token id -> added to its logit
    max_tokens          most tokens of the answer, thinking included
    clip_max_tokens     lower max_tokens to what the context leaves instead of refusing the request
    stop                strings that end the answer; they are not part of it
    logprobs            None = off, n >= 0 = the drawn token and the n best
    thinking_budget     most tokens of the thinking block
    session             whose conversation it is, for fair shares of the prefix cache; "" = by its opening
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    clip_max_tokens: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    thinking: Thinking | None = None
    thinking_budget: int | None = None
    session: str = ""


@dataclass(frozen=True)
class Status:
    """How far the model is: `percent` 0..100 while loading, `error` only when failed."""

    state: State
    percent: int = 100
    error: FreeTokenError | None = None
