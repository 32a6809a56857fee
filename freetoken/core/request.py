"""One request as a number line, and how its tokens are chosen. Integers and floats only.

    0 <= num_computed <= len(token_ids)        prompt, then what was generated
A request in flight may be one step ahead of what the host knows: `num_pending` (0 or 1) counts the
sampled token that the device holds and the host has not read yet. `think_spent` counts the tokens of
the open thinking block (-1: none is open); `doomed` was aborted inside a job and leaves with it.
Messages that cross the thread border (`Submit`, `Abort`, `Output`) are plain structs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from freetoken.core.prefix import Checkpoint, IntArray, Prefix


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class ThinkBudget:
    """After `max_tokens` tokens of an open thinking block, `forced_ids` are emitted one by one.

    `close_id` ends the block when the model emits it itself; `open_id` starts one mid-answer.
    """

    max_tokens: int
    close_id: int
    forced_ids: tuple[int, ...]
    open_id: int | None = None
    starts_open: bool = True


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    forced_ids  the answer begins with these, whatever the logits say

    Draws depend on (seed, position) only, so batch composition never changes them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 1 << 30
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    think: ThinkBudget | None = None
    forced_ids: tuple[int, ...] = ()

    @property
    def needs_history(self) -> bool:
        """True when the next draw depends on the tokens drawn so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Constraint(Protocol):
    """The form of one answer, followed token by token. Used by one thread at a time."""

    def mask(self) -> IntArray:
        """What may come next: int32 [ceil(V / 32)], bit i of word w is token 32 w + i."""

    def advance(self, token_id: int) -> bool:
        """Take a drawn token in; False if the form does not allow it."""


@dataclass(frozen=True)
class Submit:
    """A request on its way into the engine. `prompt_ids` int32 [n]; anchors are prompt offsets.

    constraint  None: any token may come
    """

    request_id: str
    prompt_ids: IntArray
    params: SamplingParams
    anchor_positions: tuple[int, ...] = ()
    anchor_ids: tuple[int, ...] = ()
    group: str = ""
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Abort:
    request_id: str


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of the drawn token and of the best alternatives (natural log)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step gave one request. `finish` is set exactly once, on the last output.

    cached_tokens, matched_tokens  prompt tokens that the prefix cache supplied, and that it knew
    queued_s  seconds from arrival to the first computation, on the device's clock
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: BaseException | None = None
    cached_tokens: int = 0
    matched_tokens: int = 0
    prompt_tokens: int = 0
    queued_s: float = 0.0


@dataclass(eq=False)
class Request:
    """A live request inside the engine; owned by the scheduler, never shared with another thread.

    number          order of arrival: the older one has the right of way
    num_cached      prompt tokens that a cache supplied when it first came in; num_matched: that it knew
    prefix          what the prefix cache holds for it; the first num_shared pages are the cache's
    save_positions  prompt positions whose state is worth saving, still to come, ascending
    save_at         save the state once this many tokens are computed, -1 = none
    saved           checkpoints not yet given to the cache
    state_broken    a dropped forward has half advanced the state
    leader          a running request whose prefill this one waits for, until leads_to tokens are handed over
    arrived_s       on the device's clock; queued_s: from then to the first computation, -1 = still to come
    """

    submit: Submit
    token_ids: IntArray = field(init=False)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    num_matched: int = 0
    num_pending: int = 0
    number: int = 0
    page_ids: list[int] = field(default_factory=list)
    state_id: int = -1
    row: int = -1
    preemptions: int = 0
    think_spent: int = -1
    doomed: bool = False
    prefix: Prefix = field(default_factory=Prefix)
    num_shared: int = 0
    save_positions: list[int] = field(default_factory=list)
    save_at: int = -1
    saved: list[Checkpoint] = field(default_factory=list)
    state_broken: bool = False
    leader: Request | None = None
    leads_to: int = 0
    arrived_s: float = 0.0
    queued_s: float = -1.0
    finish: FinishReason | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        prompt = self.submit.prompt_ids
        self.num_tokens = len(prompt)
        self.token_ids = np.empty(len(prompt) + 64, np.int32)
        self.token_ids[: len(prompt)] = prompt
        think = self.submit.params.think
        self.think_spent = 0 if think is not None and think.starts_open else -1

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def tokens(self) -> IntArray:
        """int32 [num_tokens], a view."""
        return self.token_ids[: self.num_tokens]

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.empty_like(self.token_ids)])
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
