"""Serves a model whose every token is the moment at which its one engine thread made it.

argv: seconds a step takes, seconds a request head may take. Prints the URL. All that a client measures
between a token's text and its arrival was therefore spent outside the engine.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from scripted_llm import Asked, ScriptedLLM, finish

from freetoken.api import ports, server
from freetoken.chat.events import Event, TextDelta
from freetoken.core.generate import PrefixReport, Timing
from freetoken.core.options import Options


class Stamped:
    """One answer: the engine's thread appends, the event loop is woken once a step."""

    prompt_tokens = 7

    def __init__(self, llm: StampLLM, tokens: int) -> None:
        self.llm, self.left, self.timing = llm, tokens, Timing()
        self.reuse = PrefixReport(prompt=self.prompt_tokens)
        self.events: deque[Event] = deque()
        self.ready: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def cancel(self) -> None:
        self.left = 0
        self.llm.live.discard(self)  # type: ignore[arg-type]

    async def __aiter__(self) -> AsyncIterator[Event]:
        self.ready, self.loop = asyncio.Event(), asyncio.get_running_loop()
        while True:
            self.ready.clear()
            if not self.events:
                await self.ready.wait()
            while self.events:
                event = self.events.popleft()
                yield event
                if not isinstance(event, TextDelta):
                    return


class StampLLM(ScriptedLLM):
    max_model_len = 1 << 20

    def run(self, step_s: float) -> None:
        while True:
            time.sleep(step_s)
            stamp, fed = TextDelta(f"{time.monotonic():.6f} "), list(self.live)
            for one in fed:
                one.left -= 1  # type: ignore[attr-defined]
                one.events.append(stamp)  # type: ignore[attr-defined]
                one.timing.note(1, time.perf_counter())
                if one.left <= 0:  # type: ignore[attr-defined]
                    one.events.append(finish())  # type: ignore[attr-defined]
                    self.live.discard(one)
            for loop in {one.loop for one in fed} - {None}:  # type: ignore[attr-defined]
                loop.call_soon_threadsafe(_wake, fed)

    def _submit(self, asked: Asked) -> Any:
        generation = Stamped(self, asked.params.max_tokens or 1)
        self.live.add(generation)  # type: ignore[arg-type]
        return generation


def _wake(fed: list[Any]) -> None:
    for one in fed:
        if one.ready is not None:
            one.ready.set()


def main() -> int:
    step_s, server.HEAD_S = float(sys.argv[1]), float(sys.argv[2])
    llm = StampLLM()
    threading.Thread(target=llm.run, args=(step_s,), daemon=True).start()
    options = Options(port=0, drain_seconds=1.0)
    sock = ports.bind(options.host, options.port)
    return server.run(llm, options, sock=sock, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
