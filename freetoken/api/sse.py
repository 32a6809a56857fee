"""The HTTP answer of a generating request: one JSON body, or server-sent events while it is written.

Owns the response's life: the status waits for the first event (so an early failure is a real HTTP
error), silence is filled with comment lines, a client that leaves cancels the generations, and
nothing outlives the response. Knows no protocol: a Renderer turns events into bytes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from freetoken.api.choices import Choices, Piece
from freetoken.api.errors import as_error, error_body, error_response
from freetoken.api.face import Generation
from freetoken.api.observe import Served, served
from freetoken.chat.events import Usage
from freetoken.core.errors import FreeTokenError

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Renderer(ABC):
    """One protocol's shape of one answer. It sees each event once, in order.

    Frames are JSON; how they are framed, and what a stream says when it ends, fails or is silent, is
    OpenAI's way unless a protocol says otherwise.
    """

    end = DONE

    @abstractmethod
    def feed(self, pieces: Iterable[Piece]) -> list[bytes]:
        """Take events in; return the JSON frames to stream now (ignored for a whole answer)."""

    @abstractmethod
    def tail(self, usage: Usage) -> list[bytes]:
        """Frames after the last event."""

    @abstractmethod
    def whole(self, usage: Usage) -> bytes:
        """The whole answer as JSON, the fold of everything fed."""

    def frame(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def failed(self, error: FreeTokenError) -> list[bytes]:
        """The last frames of a stream that breaks."""
        return [error_body(error)]

    def silent(self) -> list[bytes]:
        """Frames that keep a waiting client waiting; with none a comment line is sent."""
        return []


class NamedEvents(Renderer):
    """Frames that name their event. Each frame's JSON begins with its `type`."""

    end = b""
    _HEAD = b'{"type":"'

    def frame(self, data: bytes) -> bytes:
        start = len(self._HEAD)
        assert data.startswith(self._HEAD)
        return b"event: " + data[start : data.index(b'"', start)] + b"\ndata: " + data + b"\n\n"


class Reply:
    """An ASGI answer that runs `generations` to their end.

    prompts  how many prompts the generations belong to, an equal number each
    receipt  makes the receipt that the client wants in the answer: in its body, or a stream's last frame
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        renderer: Renderer,
        *,
        stream: bool,
        prompts: int = 1,
        receipt: Callable[[Served], dict[str, Any]] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._receipt = receipt
        self._generations = generations
        self._renderer = renderer
        self._is_stream = stream
        self._prompts = prompts
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        figures = served(scope)
        choices = Choices(self._generations, self._prompts)
        watcher = asyncio.create_task(_watch(receive, choices))
        try:
            if self._is_stream:
                await self._stream(choices, figures, send)
            else:
                response = await self._whole(choices, figures)
                if not choices.gone:
                    await response(scope, receive, send)
        finally:
            watcher.cancel()
            await choices.close()
            choices.note(figures)

    async def _whole(self, choices: Choices, figures: Served) -> Response:
        try:
            while not choices.done and not choices.gone:
                pieces = await choices.take()
                if pieces:
                    figures.saw_token()
                    self._renderer.feed(pieces)
        except Exception as error:
            return error_response(as_error(error), figures.error_body)
        whole = self._with_receipt([self._renderer.whole(choices.usage)], choices, figures)
        return Response(whole[0], media_type="application/json")

    async def _stream(self, choices: Choices, figures: Served, send: Send) -> None:
        started = False
        while not choices.done:
            frames: list[bytes] = []
            try:
                pieces = await choices.take(self._keep_alive_s)
                if pieces:
                    figures.saw_token()
                    frames = self._renderer.feed(pieces)
            except Exception as error:
                await self._fail(as_error(error), figures, send, started)
                return
            if choices.gone:
                return
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            body = self._frames(frames) if pieces else self._frames(self._renderer.silent()) or COMMENT
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        tail = self._frames(self._with_receipt(self._renderer.tail(choices.usage), choices, figures))
        await send({"type": "http.response.body", "body": tail + self._renderer.end})

    def _with_receipt(self, frames: list[bytes], choices: Choices, figures: Served) -> list[bytes]:
        """Write the receipt into the last of these JSON objects, if it is wanted."""
        if self._receipt is None or not frames:
            return frames
        choices.note(figures)
        receipt = msgspec.json.encode(self._receipt(figures))
        return [*frames[:-1], frames[-1][:-1] + b',"receipt":' + receipt + b"}"]

    def _frames(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(map(self._renderer.frame, frames))

    async def _fail(self, error: FreeTokenError, figures: Served, send: Send, started: bool) -> None:
        """Report a failure as an HTTP status if there is still time, else as the stream's last frames."""
        if started:
            await send({"type": "http.response.body", "body": self._frames(self._renderer.failed(error))})
            return
        response = error_response(error, figures.error_body)
        head = {"type": "http.response.start", "status": response.status_code}
        await send({**head, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})


async def _watch(receive: Receive, choices: Choices) -> None:
    """Wait for the client to leave; the body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    choices.client_left()
