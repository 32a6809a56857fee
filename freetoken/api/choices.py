"""The n answers of one request, merged in the order in which they arrive.

A pump per generation moves events into one list; the writer takes all that is there, so a slow client
gets fewer, larger pieces and an engine step wakes the loop once however many choices it fed.
Knows no protocol. Closing is idempotent and leaves neither a task nor a running generation behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from freetoken.api.face import Generation
from freetoken.api.observe import Served
from freetoken.chat.events import Event, Finish, Usage
from freetoken.core.errors import BusyError, DeviceError, FreeTokenError

Piece = tuple[int, Event]
SETTLE_S = 2.0


class Choices:
    """Generations being read; made inside a running loop.

    done    every generation has ended and every event was taken
    gone    the client has left (set by `client_left`)
    usage   sums over the choices; the prompt counts once
    """

    def __init__(self, generations: Sequence[Generation], prompts: int = 1) -> None:
        self._generations = generations
        self._per_prompt = max(1, len(generations) // prompts)
        self._finished: dict[int, Finish] = {}
        self._pending: list[Piece] = []
        self._wake = asyncio.Event()
        self._error: FreeTokenError | Exception | None = None
        self.gone = False
        self._closing = False
        self._pumps = [asyncio.create_task(self._pump(i, g)) for i, g in enumerate(generations)]

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def done(self) -> bool:
        ended = len(self._finished) == len(self._generations)
        return ended and not self._pending and self._error is None

    @property
    def usage(self) -> Usage:
        total = Usage()
        for i, finish in self._finished.items():
            u, once = finish.usage, i % self._per_prompt == 0
            total = Usage(
                total.prompt_tokens + (u.prompt_tokens if once else 0),
                total.completion_tokens + u.completion_tokens,
                total.cached_tokens + (u.cached_tokens if once else 0),
                total.reasoning_tokens + u.reasoning_tokens,
            )
        return total

    async def take(self, timeout_s: float | None = None) -> list[Piece]:
        """Wait for events and return all there are; empty after `timeout_s` or when the client left.

        Raises the FreeTokenError that a generation failed with, after the events before it.
        """
        expired = asyncio.Event()
        timer: asyncio.TimerHandle | None = None
        while not (self._pending or self._error or self.gone or self.done or expired.is_set()):
            if timeout_s and timer is None:
                timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, expired)
            await self._wake.wait()
            self._wake.clear()
        if timer is not None:
            timer.cancel()
        pieces, self._pending = self._pending, []
        if not pieces and self._error is not None and not self.gone:
            raise self._error
        return pieces

    def _expire(self, expired: asyncio.Event) -> None:
        expired.set()
        self._wake.set()

    def client_left(self) -> None:
        self.gone = True
        self._wake.set()

    def note(self, figures: Served) -> None:
        """Write the counts so far into the request's figures."""
        usage = self.usage
        known = self._generations[:: self._per_prompt]
        figures.prompt_tokens = sum(g.prompt_tokens for g in known)
        figures.completion_tokens = usage.completion_tokens
        figures.cached_tokens = usage.cached_tokens
        figures.prefixes = [g.reuse for g in known]
        figures.timings = [g.timing for g in self._generations]
        reasons = dict.fromkeys(self._finished[i].reason for i in sorted(self._finished))
        figures.finish = "disconnect" if self.gone else "+".join(reasons)

    async def close(self) -> None:
        """Cancel what still runs and wait shortly for its last counts."""
        self._closing = True
        for i, generation in enumerate(self._generations):
            if i not in self._finished:
                generation.cancel()
        running = [p for p in self._pumps if not p.done()]
        if running:
            await asyncio.wait(running, timeout=SETTLE_S)
        for pump in running:
            pump.cancel()

    async def _pump(self, index: int, generation: Generation) -> None:
        try:
            async for event in generation:
                if isinstance(event, Finish):
                    self._end(index, event)
                if self._error is None:
                    self._pending.append((index, event))
                    self._wake.set()
        except Exception as error:
            self._error = self._error or error
        finally:
            if index not in self._finished:
                generation.cancel()
                self._end(index, Finish("abort"))
            self._wake.set()

    def _end(self, index: int, finish: Finish) -> None:
        if not finish.usage.prompt_tokens:
            counted = replace(finish.usage, prompt_tokens=self._generations[index].prompt_tokens)
            finish = replace(finish, usage=counted)
        self._finished[index] = finish
        if self._error is None and not self._closing:
            self._error = _failure(finish)


def _failure(finish: Finish) -> FreeTokenError | None:
    """An answer that neither the model nor its limits ended is an error, never a short answer."""
    if finish.reason == "abort":
        return BusyError(
            "The server stopped this request before it was finished.",
            code="aborted",
            hint="Send it again when the server is up.",
        )
    if finish.reason == "error":
        return DeviceError("The engine failed while answering.", hint="See the server's log.")
    return None
