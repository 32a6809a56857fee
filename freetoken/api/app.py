"""The ASGI application: routes, and the way of a request from bytes to a Reply.

Owns no state but the metrics. Every failure leaves through `errors`; a request runs only when the
model is ready; submitting happens off the event loop, because a long prompt takes long to tokenize.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from freetoken.api import (
    anthropic,
    memory,
    models,
    openai_chat,
    openai_completions,
    openai_responses,
    openapi,
    page,
)
from freetoken.api.anthropic_answer import CountBody, MessageRenderer
from freetoken.api.anthropic_answer import error_body as anthropic_error
from freetoken.api.auth import Gate, allowed_origins, read_keys
from freetoken.api.body import read_body
from freetoken.api.errors import as_error, error_response
from freetoken.api.face import Generation, LanguageModel
from freetoken.api.metrics import Metrics
from freetoken.api.observe import Observer, served
from freetoken.api.openai_chat_answer import ChatRenderer
from freetoken.api.openai_completions import CompletionRenderer, echo_text
from freetoken.api.openai_responses_answer import Head, ResponseRenderer
from freetoken.api.openai_responses_items import ToolNames
from freetoken.api.receipts import Receipts
from freetoken.api.response_store import ResponseStore
from freetoken.api.sampling import for_choice
from freetoken.api.sessions import session_of
from freetoken.api.sse import KEEP_ALIVE_S, Renderer, Reply
from freetoken.core.errors import MethodError, NotFoundError, nearest
from freetoken.core.options import Options

RECEIPT_HEADER = "x-freetoken-receipt"
"""With it an answer carries its own receipt."""
Handler = Callable[[Request], Awaitable[Response | Reply]]


def create_app(llm: LanguageModel, options: Options, *, keep_alive_s: float = KEEP_ALIVE_S) -> ASGIApp:
    """Build the application that serves `llm`.

    keep_alive_s  a stream that was silent for so long gets a comment line
    """
    return _Api(llm, options, keep_alive_s).build()


class _Api:
    def __init__(self, llm: LanguageModel, options: Options, keep_alive_s: float) -> None:
        self.llm = llm
        self.options = options
        self.keep_alive_s = keep_alive_s
        self.metrics = Metrics()
        self.store = ResponseStore()
        self.receipts = Receipts(llm.stats)
        self.keys = read_keys(options)
        self.resizing = asyncio.Lock()

    def build(self) -> ASGIApp:
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/v1/cache/resize": self.resize,
        }
        gets: dict[str, Handler] = {
            "/": self.index,
            "/health": self.health,
            "/v1/models": self.list_models,
            "/v1/models/{model:path}": self.get_model,
            "/v1/responses/{id}": self.get_response,
            "/v1/requests": self.list_receipts,
            "/v1/requests/{id}": self.receipt,
            "/v1/cache": self.cache,
            "/v1/stats": self.stats,
            "/metrics": self.prometheus,
            "/openapi.json": self.openapi,
            "/api/hello": self.hello,
        }
        routes = [Route(path, _guarded(f), methods=["POST"]) for path, f in posts.items()]
        routes += [Route(path, _guarded(f), methods=["GET"]) for path, f in gets.items()]
        routes.append(Route("/v1/responses/{id}", _guarded(self.delete_response), methods=["DELETE"]))
        paths = [path for path in (*posts, *gets) if "{" not in path]
        observer = Middleware(
            Observer,
            metrics=self.metrics,
            known_paths=frozenset(paths),
            error_bodies={"/v1/messages": anthropic_error},
            receipts=self.receipts,
        )
        middleware = [observer]
        origins = allowed_origins(self.options)
        if origins:
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            )
        middleware.append(Middleware(Gate, options=self.options, keys=self.keys))
        handlers = {HTTPException: partial(_http_error, paths)}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    def _reply(
        self,
        request: Request,
        generations: Sequence[Generation],
        renderer: Renderer,
        *,
        stream: bool,
        prompts: int = 1,
    ) -> Reply:
        receipt = partial(self.receipts.so_far, path=request.url.path, status=200)
        return Reply(
            generations,
            renderer,
            stream=stream,
            prompts=prompts,
            receipt=receipt if _wants_receipt(request) else None,
            keep_alive_s=self.keep_alive_s,
        )

    async def chat(self, request: Request) -> Response | Reply:
        models.check_ready(self.llm)
        body = openai_chat.parse(await read_body(request))
        name = models.check_model(self.llm, self.options, body.model)
        conversation = body.to_conversation()
        params = body.generate_params().of_session(session_of(request.headers, body, conversation))
        n, stream, request_id = body.n or 1, bool(body.stream), served(request.scope).id
        generations = await _submit(
            [
                partial(self.llm.submit_chat, conversation, for_choice(params, i), f"{request_id}-{i}")
                for i in range(n)
            ]
        )
        renderer = ChatRenderer(
            request_id,
            name,
            n,
            logprobs=bool(body.logprobs),
            stream=stream,
            usage=body.wants_usage or _wants_receipt(request),
        )
        return self._reply(request, generations, renderer, stream=stream)

    async def completions(self, request: Request) -> Response | Reply:
        models.check_ready(self.llm)
        body = openai_completions.parse(await read_body(request))
        name = models.check_model(self.llm, self.options, body.model)
        prompts = body.prompts()
        params = body.generate_params().of_session(session_of(request.headers, body, None))
        n, stream, request_id = body.check_choices(len(prompts)), bool(body.stream), served(request.scope).id
        echoes = [echo_text(p, self.llm.tokenizer) if body.echo else "" for p in prompts for _ in range(n)]
        generations = await _submit(
            [
                partial(self.llm.submit_text, prompt, for_choice(params, i), f"{request_id}-{p}-{i}")
                for p, prompt in enumerate(prompts)
                for i in range(n)
            ]
        )
        renderer = CompletionRenderer(
            request_id,
            name,
            echoes,
            stream=stream,
            top=body.logprobs,
            usage=body.wants_usage or _wants_receipt(request),
        )
        return self._reply(request, generations, renderer, stream=stream, prompts=len(prompts))

    async def responses(self, request: Request) -> Response | Reply:
        models.check_ready(self.llm)
        body = openai_responses.parse(await read_body(request))
        name = models.check_model(self.llm, self.options, body.model)
        earlier = self.store.history(body.previous_response_id) if body.previous_response_id else []
        items, names = [*earlier, *body.new_items()], ToolNames(body.tools or [])
        conversation = body.to_conversation(items, names)
        params = body.generate_params().of_session(session_of(request.headers, body, conversation))
        request_id = served(request.scope).id

        def keep(output: list[Any], whole: bytes) -> None:
            if body.store is not False:
                self.store.put(f"resp_{request_id}", [*items, *output], whole)

        generations = await _submit([partial(self.llm.submit_chat, conversation, params, request_id)])
        head = Head(request_id, name, body.echo(), names, body.wants_logprobs, body.wants_encrypted)
        renderer = ResponseRenderer(head, keep)
        return self._reply(request, generations, renderer, stream=bool(body.stream))

    async def get_response(self, request: Request) -> Response:
        return Response(self.store.body(request.path_params["id"]), media_type="application/json")

    async def delete_response(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        self.store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> Response | Reply:
        models.check_ready(self.llm)
        body = anthropic.parse(await read_body(request))
        name = models.check_model(self.llm, self.options, body.model)
        conversation = body.to_conversation()
        params = body.generate_params().of_session(session_of(request.headers, body, conversation))
        request_id = served(request.scope).id
        generations = await _submit([partial(self.llm.submit_chat, conversation, params, request_id)])
        renderer = MessageRenderer(
            request_id,
            name,
            generations[0].prompt_tokens,
            body.max_tokens,
            omit_thinking=body.omits_thinking,
        )
        return self._reply(request, generations, renderer, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        models.check_ready(self.llm)
        body = anthropic.parse_count(await read_body(request))
        count = partial(self.llm.count_chat, body.to_conversation(), body.thinking_params())
        number = await asyncio.get_running_loop().run_in_executor(None, count)
        return Response(msgspec.json.encode(CountBody(number)), media_type="application/json")

    async def hello(self, request: Request) -> Response:
        """An agent asks here whether anyone listens."""
        return JSONResponse({"message": "hello"})

    async def index(self, request: Request) -> Response:
        return HTMLResponse(page.render(self.llm, str(request.base_url), bool(self.keys)))

    async def health(self, request: Request) -> Response:
        status, body = models.health(self.llm)
        return JSONResponse(body, status)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse(models.listing(self.llm))

    async def get_model(self, request: Request) -> Response:
        name = models.check_model(self.llm, self.options, request.path_params["model"])
        return JSONResponse(models.card(self.llm, name))

    async def receipt(self, request: Request) -> Response:
        return JSONResponse(self.receipts.get(request.path_params["id"]))

    async def list_receipts(self, request: Request) -> Response:
        return JSONResponse(self.receipts.listing(request.query_params.get("limit", "")))

    async def cache(self, request: Request) -> Response:
        return JSONResponse(memory.report(self.llm))

    async def resize(self, request: Request) -> Response:
        models.check_ready(self.llm)
        size = memory.parse(await read_body(request))
        async with self.resizing:  # each may wait long, in a thread that requests need
            done = await asyncio.get_running_loop().run_in_executor(None, memory.resize, self.llm, size)
        return JSONResponse(done)

    async def stats(self, request: Request) -> Response:
        return JSONResponse(dict(self.llm.stats()))

    async def openapi(self, request: Request) -> Response:
        return Response(openapi.document(), media_type="application/json")

    async def prometheus(self, request: Request) -> Response:
        text = self.metrics.render(self.llm.stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _wants_receipt(request: Request) -> bool:
    return request.headers.get(RECEIPT_HEADER, "").lower() in ("1", "true")


async def _submit(calls: Sequence[Callable[[], Generation]]) -> list[Generation]:
    """Submit in a worker thread. If this task is cancelled meanwhile, what was submitted is cancelled."""
    work = asyncio.get_running_loop().run_in_executor(None, _submit_all, calls)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_cancel_all)
        raise


def _submit_all(calls: Sequence[Callable[[], Generation]]) -> list[Generation]:
    generations: list[Generation] = []
    try:
        for call in calls:
            generations.append(call())
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return generations


def _cancel_all(work: asyncio.Future[list[Generation]]) -> None:
    if not work.cancelled() and work.exception() is None:
        for generation in work.result():
            generation.cancel()


def _guarded(handler: Handler) -> Handler:
    """Turn whatever a handler raises into an error answer; a client that left gets none."""

    async def guarded(request: Request) -> Response | Reply:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return error_response(as_error(error), served(request.scope).error_body)

    return guarded


async def _http_error(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """What the router raises: an unknown path names its neighbours, a wrong method the right one."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    if error.status_code == 405:
        wrong = MethodError(
            f"{request.url.path} does not take {request.method}.", hint=f"Use {allowed or 'another method'}."
        )
        response = error_response(wrong, served(request.scope).error_body)
        response.headers["allow"] = allowed
        return response
    hint = nearest(request.url.path, paths) or f"There are: {', '.join(paths)}."
    missing = NotFoundError(f"There is nothing at {request.url.path}.", code="unknown_path", hint=hint)
    return error_response(missing, served(request.scope).error_body)
