"""What a caller may wish of one answer, and whether the model can answer at all. Plain values.

The words of users (thinking, stop strings), not of the sampler: `llm` turns GenerateParams into
SamplingParams with the model's defaults and token ids. `None` always means: the server decides.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Literal

from freetoken.core.errors import FreeTokenError

Thinking = Literal["auto", "on", "off"]
State = Literal["loading", "ok", "failed"]
LEAST_LOSS = 64
"""Tokens computed again that need no explanation: the rest of a page, the way back to an anchor."""
GAP_BOUNDS_S = (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0, 30.0)


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

    def of_session(self, session: str) -> GenerateParams:
        """The same wishes of a conversation that was named; "" changes nothing."""
        return replace(self, session=session) if session else self


@dataclass
class PrefixReport:
    """What of one prompt was reused, and why not more. All figures in tokens.

    shared   in common with the earlier prompt, and its answer, that is most like this one
    edit     what was changed since then: a cause of `chat/prompt_edit.py`, "" = nothing
    where    the part of the prompt in which the first changed token lies
    cached   reused; matched: what the prefix cache still knew; is_off: there is no prefix cache
    """

    prompt: int = 0
    shared: int = 0
    edit: str = ""
    where: str = ""
    cached: int = 0
    matched: int = 0
    is_off: bool = False

    @property
    def lost(self) -> int:
        """Tokens that had been computed before and were computed again."""
        return max(min(self.shared, self.prompt - 1) - self.cached, 0)

    @property
    def cause(self) -> str:
        """Why more was not reused: `evicted`, `no_state` (nothing to resume from), or the edit."""
        if self.is_off:
            return "cache_off"
        if self.edit and self.lost < self.prompt - self.shared:
            return self.edit
        return self.loss or self.edit

    @property
    def loss(self) -> str:
        """Why tokens were lost: `evicted`, or `no_state` (nothing close to resume from); "" if hardly any."""
        if self.lost <= LEAST_LOSS:
            return ""
        return "evicted" if self.matched + LEAST_LOSS < min(self.shared, self.prompt) else "no_state"

    def to_dict(self) -> dict[str, int | str | None]:
        return {
            "reused": self.cached,
            "recomputed": self.prompt - self.cached,
            "lost": self.lost,
            "cause": self.cause or None,
            "edit": self.edit or None,
            "first_difference": self.shared if self.edit and self.edit != "new" else None,
            "where": self.where or None,
        }


@dataclass(frozen=True)
class Status:
    """How far the model is; `error` only when failed.

    percent   0..100 of the loading; when `ok`, of the experts that are in memory: it answers before all are
    """

    state: State
    percent: int = 100
    error: FreeTokenError | None = None


@dataclass
class Timing:
    """When the tokens of one answer came, in seconds; written where the engine hands them over.

    submitted_s when the request went to the engine, 0 = not told
    engine_s    from submission to the first token: waiting in line included, HTTP and text not
    queued_s    from submission to the first computation
    last_s      when the last tokens came, 0 = none yet
    gap_counts  gaps between tokens: how many were <= GAP_BOUNDS_S[i] and longer than the bound before
    """

    queued_s: float = 0.0
    submitted_s: float = 0.0
    engine_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    gap_sum_s: float = 0.0
    gap_counts: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1))

    def note(self, num_tokens: int, now_s: float) -> None:
        """Tokens came at `now_s`; those that come together share the gap before them."""
        if self.tokens:
            gap_s = (now_s - self.last_s) / num_tokens
            self.gap_counts[bisect_left(GAP_BOUNDS_S, gap_s)] += num_tokens
            self.gap_sum_s += now_s - self.last_s
            self.tokens += num_tokens
        else:
            self.tokens = num_tokens
            self.engine_s = now_s - self.submitted_s if self.submitted_s else 0.0
            self.gap_counts[0] += num_tokens - 1
        self.last_s = now_s
