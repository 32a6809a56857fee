"""/openapi.json: the main routes, their bodies described by the very types that decode them.

Knows the request types and the errors' shape. Answers are described loosely: each protocol's own
documentation defines them, and clients check them.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from freetoken import __version__
from freetoken.api.anthropic import CountRequest, MessagesRequest
from freetoken.api.memory import ResizeRequest
from freetoken.api.openai_chat import ChatRequest
from freetoken.api.openai_completions import CompletionRequest
from freetoken.api.openai_responses import ResponsesRequest

_POSTS: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation (OpenAI)"),
    "/v1/completions": (CompletionRequest, "Complete a text (OpenAI)"),
    "/v1/responses": (ResponsesRequest, "Answer a conversation of items (OpenAI)"),
    "/v1/messages": (MessagesRequest, "Answer a conversation (Anthropic)"),
    "/v1/messages/count_tokens": (CountRequest, "Count a prompt's tokens (Anthropic)"),
    "/v1/cache/resize": (ResizeRequest, "Use more or less device memory from now on"),
}
_STREAMS = tuple(path for path in _POSTS if path not in ("/v1/messages/count_tokens", "/v1/cache/resize"))
_GETS = {
    "/health": "Whether requests are taken",
    "/v1/models": "The model that is served",
    "/v1/models/{model}": "One model",
    "/v1/responses/{id}": "A stored response",
    "/v1/requests/{id}": "The receipt of a request that has ended",
    "/v1/requests": "The receipts of the latest requests, newest first",
    "/v1/cache": "What memory is used for",
    "/v1/stats": "Figures of the engine",
    "/metrics": "The same for Prometheus",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {name: {"type": "string"} for name in ("message", "type", "code")},
        }
    },
}
_FAILURE = {
    "description": "Refused; `code` is stable and the message names the next step",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


@functools.cache
def document() -> bytes:
    """The whole document as JSON (OpenAPI 3.1)."""
    types = [kind for kind, _ in _POSTS.values()]
    bodies, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, (_, text)), body in zip(_POSTS.items(), bodies, strict=True):
        paths[path] = {"post": _operation(path, text, body)}
    for path, text in _GETS.items():
        paths[path] = {"get": _operation(path, text)}
    paths["/v1/responses/{id}"]["delete"] = _operation("/v1/responses/{id}", "Forget a stored response")
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "FreeToken", "version": __version__},
            "paths": paths,
            "components": {"schemas": {**schemas, "Error": _ERROR}, "securitySchemes": keys},
            "security": [{}, {"bearer": []}, {"header": []}],
        }
    )


def _operation(path: str, text: str, body: Any = None) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {}}
    if path in _STREAMS:
        content["text/event-stream"] = {}
    found: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "Done", "content": content}, "4XX": _FAILURE, "503": _FAILURE},
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return found
