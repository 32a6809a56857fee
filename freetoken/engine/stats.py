"""What the engine counts. Plain numbers, snapshot by copy; torch-free."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineStats:
    """Counters since start; times in seconds on the device's clock (virtual on `sim`).

    step_s keeps the last 512 decode steps, for rates and percentiles.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    jobs: int = 0
    resizes: int = 0
    halved_chunks: int = 0
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=512))

    def note_step(self, seconds: float, tokens: int) -> None:
        self.steps += 1
        self.output_tokens += tokens
        if tokens:
            self.step_s.append(seconds)
            self.step_tokens.append(tokens)

    def snapshot(self) -> dict[str, Any]:
        """Nested plain numbers for /v1/stats and the status line."""
        times = sorted(self.step_s)
        total = sum(times)
        return {
            "requests": self.requests,
            "finished": self.finished,
            "aborted": self.aborted,
            "failed": self.failed,
            "preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "steps": self.steps,
            "jobs": self.jobs,
            "resizes": self.resizes,
            "halved_chunks": self.halved_chunks,
            "decode_tok_s": sum(self.step_tokens) / total if total else 0.0,
            "step_ms_p50": 1000 * times[len(times) // 2] if times else 0.0,
            "step_ms_p95": 1000 * times[int(len(times) * 0.95)] if times else 0.0,
        }
