"""A token source that plays written events instead of running a model: the API's other side.

Steps of a script: an Event is emitted, a number waits so many seconds, an exception is raised, HANG
waits for cancel. It counts what is live, so that tests can see whether anything was left running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freetoken.chat.conversation import Conversation
from freetoken.chat.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenInfo,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from freetoken.core.errors import ContextLengthError
from freetoken.core.generate import GenerateParams, PrefixReport, Status, Timing

HANG = "hang"
Step = Event | Exception | float | str
PROMPT_TOKENS = 7


@dataclass
class Asked:
    """One submission: what arrived behind the wire."""

    prompt: Any
    params: GenerateParams
    request_id: str


Script = Callable[[Asked], Sequence[Step]]


def finish(reason: str = "stop", tokens: int = 3, cached: int = 0, reasoning: int = 0) -> Finish:
    return Finish(reason, Usage(PROMPT_TOKENS, tokens, cached, reasoning))  # type: ignore[arg-type]


def info(text: str, logprob: float = -0.5, top: int = 0) -> TokenInfo:
    best = tuple(TokenInfo(90 + i, f"alt{i}", f"alt{i}".encode(), -1.0 - i) for i in range(top))
    return TokenInfo(1, text, text.encode(), logprob, best)


def say(*words: str, reason: str = "stop", top: int | None = None) -> list[Step]:
    """One token a word; with `top` each token carries its log prob and so many alternatives."""
    steps: list[Step] = []
    for word in words:
        if top is not None:
            steps.append(TokenLogprobs((info(word, top=top),)))
        steps.append(TextDelta(word))
    return [*steps, finish(reason, tokens=len(words))]


def think_then_call() -> list[Step]:
    """Thoughts, a sentence and two calls in one turn, cut into small pieces."""
    return [
        ReasoningDelta("They want "),
        ReasoningDelta("weather."),
        TextDelta("Let me "),
        TextDelta("look."),
        ToolCallStart(0, "call_a", "weather"),
        ToolCallDelta(0, '{"city": '),
        ToolCallDelta(0, '"Oslo"}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call_b", "clock"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
        finish("tool_calls", tokens=21, cached=4, reasoning=5),
    ]


@dataclass(eq=False)
class ScriptedGeneration:
    llm: ScriptedLLM
    steps: Sequence[Step]
    prompt_tokens: int = PROMPT_TOKENS
    cancelled: threading.Event = field(default_factory=threading.Event)
    timing: Timing = field(default_factory=Timing)
    reuse: PrefixReport = field(default_factory=lambda: PrefixReport(PROMPT_TOKENS))

    def cancel(self) -> None:
        if not self.cancelled.is_set():
            self.cancelled.set()
            self.llm.end(self, cancelled=True)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for step in self.steps:
            if isinstance(step, float):
                await self._wait(step)
            elif isinstance(step, str):
                await self._wait(3600.0)
            if self.cancelled.is_set():
                yield finish("abort")
                return
            if isinstance(step, Exception):
                self.llm.end(self)
                raise step
            if not isinstance(step, (float, str)):
                if isinstance(step, Finish):
                    self.llm.end(self)
                elif isinstance(step, (TextDelta, ReasoningDelta)):
                    self.timing.note(1, time.perf_counter())
                yield step

    async def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.cancelled.is_set():
            await asyncio.sleep(min(0.005, seconds))


class Letters:
    """A decoder in which id 65 is A."""

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return "".join(chr(i) for i in ids)


class ScriptedLLM:
    """Plays `script(asked)` for each submission; `asked` keeps them all."""

    model_name = "scripted"
    max_model_len = 4096
    created = 1_700_000_000
    tokenizer = Letters()

    def __init__(self, script: Script | None = None, status: Status | None = None) -> None:
        self.reset(script, status)

    def reset(self, script: Script | None = None, status: Status | None = None) -> None:
        """Forget everything, so that a server can be used by the next test."""
        self.__dict__.clear()
        self.script: Script = script or (lambda _: say("Hel", "lo", "!"))
        self.current_status = status or Status("ok")
        self.asked: list[Asked] = []
        self.live: set[ScriptedGeneration] = set()
        self.num_cancelled = 0
        self.submit_delay_s = 0.0
        self.resized: list[int] = []
        self.resize_error: Exception | None = None
        self.may_resize = threading.Event()
        self.may_resize.set()
        self._lock = threading.Lock()

    def status(self) -> Status:
        return self.current_status

    def stats(self) -> dict[str, Any]:
        return {"experts": {"hits": 3, "misses": 1}, "running": len(self.live), "backend": "fused"}

    def resize_memory(self, total_bytes: int) -> None:
        if self.resize_error is not None:
            raise self.resize_error
        self.may_resize.wait(60)
        self.resized.append(total_bytes)

    def submit_chat(
        self, conversation: Conversation, params: GenerateParams, request_id: str
    ) -> ScriptedGeneration:
        return self._submit(Asked(conversation, params, request_id))

    def count_chat(self, conversation: Conversation, params: GenerateParams) -> int:
        self.asked.append(Asked(conversation, params, ""))
        return PROMPT_TOKENS

    def submit_text(
        self, prompt: str | np.ndarray, params: GenerateParams, request_id: str
    ) -> ScriptedGeneration:
        return self._submit(Asked(prompt, params, request_id))

    def _submit(self, asked: Asked) -> ScriptedGeneration:
        time.sleep(self.submit_delay_s)
        wished = 0 if asked.params.clip_max_tokens else asked.params.max_tokens or 0
        if wished > self.max_model_len:
            raise ContextLengthError(PROMPT_TOKENS, self.max_model_len, max_tokens=wished)
        generation = ScriptedGeneration(self, self.script(asked))
        with self._lock:
            self.asked.append(asked)
            self.live.add(generation)
        return generation

    def end(self, generation: ScriptedGeneration, cancelled: bool = False) -> None:
        with self._lock:
            self.num_cancelled += cancelled and generation in self.live
            self.live.discard(generation)

    async def drain(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.live and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for generation in list(self.live):
            generation.cancel()

    def wait_until_idle(self, timeout_s: float = 5.0) -> bool:
        until = time.monotonic() + timeout_s
        while self.live and time.monotonic() < until:
            time.sleep(0.005)
        return not self.live
