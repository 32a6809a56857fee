"""A session with a server that runs already, over its OpenAI-shaped API, with http.client alone.

Turns chunks of `POST /v1/chat/completions` back into chat events, so that the commands need not know
who answers. Knows the wire format and nothing of the engine.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from freetoken.core.errors import BusyError, FreeTokenError, RequestError
from freetoken.core.generate import GenerateParams

PROBE_S = 0.5
ANSWER_S = 600.0
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class RemoteSession:
    """One server. Each answer has its own connection, closed to cancel it."""

    def __init__(self, host: str, port: int, model_name: str, api_key: str | None = None) -> None:
        self.host, self.port = _LOCAL.get(host, host), port
        self.model_name = model_name
        self.max_model_len = 0
        self.api_key = api_key

    @property
    def place(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, conversation: Conversation, params: GenerateParams) -> RemoteStream:
        body = request_body(self.model_name, conversation, params)
        return RemoteStream(self._connect(ANSWER_S), body, self._headers())

    def stats(self) -> Mapping[str, Any]:
        try:
            return _get(self._connect(PROBE_S * 4), "/v1/stats", self._headers())
        except (OSError, http.client.HTTPException, ValueError):
            return {}

    def close(self) -> None:
        """Nothing to close: the server lives on."""

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def find_server(host: str, port: int, api_key: str | None = None) -> RemoteSession | None:
    """Return a session with the FreeToken server at host:port, or None if there is none ready."""
    session = RemoteSession(host, port, "", first_key(api_key))
    headers = session._headers()
    try:
        health = _get(session._connect(PROBE_S), "/health", headers)
        if health.get("status") not in ("ok", "loading"):
            return None
        listed = _get(session._connect(PROBE_S * 4), "/v1/models", headers)
        session.model_name = str(listed["data"][0]["id"])
        session.max_model_len = int(listed["data"][0].get("max_model_len") or 0)
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError):
        return None
    return session


def first_key(api_key: str | None) -> str | None:
    """The option may hold several keys; any of them opens the server."""
    return (api_key or "").split(",")[0].strip() or None


def _get(connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        connection.request("GET", path, headers=dict(headers))
        body = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise ValueError(path)
    return body


class RemoteStream:
    """One streamed answer as events."""

    def __init__(
        self, connection: http.client.HTTPConnection, body: dict[str, Any], headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        self._body = body
        self._headers = {"Content-Type": "application/json", **headers}
        self._cancelled = False

    def __iter__(self) -> Iterator[Event]:
        try:
            self._connection.request(
                "POST", "/v1/chat/completions", json.dumps(self._body).encode(), self._headers
            )
            response = self._connection.getresponse()
            if response.status != 200:
                raise _error(response.status, response.read())
            yield from chunk_events(_data_lines(response))
        except (OSError, http.client.HTTPException) as e:
            if not self._cancelled:
                raise BusyError(
                    f"The server at {self._connection.host}:{self._connection.port} broke off: {e}.",
                    code="server_gone",
                    hint="Is it still running? Ask again, or start your own engine with --local.",
                ) from e
        finally:
            self._connection.close()

    def cancel(self) -> None:
        self._cancelled = True
        if self._connection.sock is not None:
            self._connection.sock.close()


def _data_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    for line in response:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def chunk_events(lines: Iterator[bytes]) -> Iterator[Event]:
    """Turn the data lines of a chat stream into events. FreeTokenError if the stream carries one."""
    open_call, reason, usage = -1, "stop", Usage()
    for line in lines:
        if line == b"[DONE]":
            break
        chunk = json.loads(line)
        if "error" in chunk:
            raise _error(500, line)
        usage = _usage(chunk.get("usage")) or usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                yield ReasoningDelta(delta["reasoning_content"])
            if delta.get("content"):
                yield TextDelta(delta["content"])
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if call["index"] != open_call:
                    if open_call >= 0:
                        yield ToolCallEnd(open_call)
                    open_call = call["index"]
                    yield ToolCallStart(open_call, call.get("id") or "", function.get("name") or "")
                if function.get("arguments"):
                    yield ToolCallDelta(open_call, function["arguments"])
            reason = choice.get("finish_reason") or reason
    if open_call >= 0:
        yield ToolCallEnd(open_call, complete=reason == "tool_calls")
    yield Finish(reason if reason in ("stop", "length", "tool_calls", "abort") else "error", usage)  # type: ignore[arg-type]


def _usage(body: Mapping[str, Any] | None) -> Usage | None:
    if not body:
        return None
    cached = (body.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (body.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return Usage(body.get("prompt_tokens", 0), body.get("completion_tokens", 0), cached, reasoning)


def _error(status: int, body: bytes) -> FreeTokenError:
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or "server_error")
    except (ValueError, KeyError, TypeError):
        message, code = f"The server answered {status}.", "server_error"
    kind = BusyError if status == 503 else RequestError
    return kind(message, code=code)


def request_body(model: str, conversation: Conversation, params: GenerateParams) -> dict[str, Any]:
    """The JSON body of a streaming chat request that means `conversation` and `params`."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(m) for m in conversation.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if conversation.tools:
        body["tools"] = [t.to_template() for t in conversation.tools]
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"):
        value = getattr(params, name)
        if value is not None:
            body[name] = value
    if params.stop:
        body["stop"] = params.stop
    if params.thinking in ("on", "off"):
        body["chat_template_kwargs"] = {"enable_thinking": params.thinking == "on"}
    return body


def _message(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {
                    "name": c.name,
                    "arguments": c.arguments
                    if isinstance(c.arguments, str)
                    else json.dumps(c.arguments, ensure_ascii=False),
                },
            }
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out
