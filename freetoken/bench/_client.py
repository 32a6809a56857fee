"""A client of OpenAI-compatible servers that measures: streamed completions, timed piece by piece.

Needs the standard library alone, so that any server can be measured with it anywhere. Knows no engine. Rates
count the tokens of the server's own usage report; where it reports none, pieces of text are counted.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from freetoken.core.errors import DeviceError

TIMEOUT_S = 600.0


@dataclass
class Answer:
    """One streamed completion, times on `time.perf_counter`.

    times_s  of its pieces of text; told_s: when the first of them, or the answer's end without one, was there
    id       the server's for it
    """

    asked_s: float
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    ended_s: float = 0.0
    id: str = ""
    told_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.asked_s

    @property
    def tok_s(self) -> float:
        """Tokens a second behind the first piece."""
        spent = self.times_s[-1] - self.times_s[0]
        return (self.tokens - 1) / spent if spent > 0 else 0.0


class Server:
    """One base URL. model: what requests name."""

    def __init__(self, base: str, model: str = "", key: str = "") -> None:
        parts = urlsplit(base)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model

    def get(self, path: str) -> dict[str, Any]:
        with self._connection() as c:
            c.request("GET", self._path + path, headers=self._headers)
            with c.getresponse() as response:
                found: dict[str, Any] = json.loads(_body(response))
        return found

    def find_model(self) -> str:
        """The name of the model served; kept for later requests."""
        if not self.model:
            self.model = str(self.get("/v1/models")["data"][0]["id"])
        return self.model

    def complete(self, prompt: str, tokens: int, started: Callable[[], None] = lambda: None) -> Answer:
        """Exactly `tokens` greedy tokens; `started` is called when the first piece is there."""
        answer = self._stream("/v1/completions", {"prompt": prompt, "cache_prompt": False}, tokens, started)
        if not answer.times_s:
            raise DeviceError("The server's answer has no text.")
        answer.tokens = answer.tokens or len(answer.times_s)
        return answer

    def try_out(self) -> None:
        """A completion of two tokens, which may have no text: the prompt is not of the model's own."""
        asked = {"prompt": "one two three", "cache_prompt": False}
        self._stream("/v1/completions", asked, 2, lambda: None)

    def chat(self, messages: Sequence[dict[str, str]], tokens: int) -> Answer:
        """Tokens for a conversation, of which the server may know a part already. They may have no text."""
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, tokens, lambda: None)

    def _stream(self, path: str, asked: dict[str, Any], tokens: int, started: Callable[[], None]) -> Answer:
        body = json.dumps(
            {
                "model": self.model,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **asked,
            }
        )
        with self._connection() as c:
            answer = Answer(time.perf_counter())
            c.request("POST", self._path + path, body, self._headers)
            with c.getresponse() as response:
                answer.id = response.headers.get("x-request-id") or ""
                if response.status != 200:
                    raise DeviceError(f"The server answered {response.status}: {_body(response)[:300]!r}")
                for data in _events(response):
                    _take(answer, data, started)
            answer.ended_s = time.perf_counter()
        return answer

    def together(
        self, prompts: Sequence[str], tokens: int, all_started: Callable[[], None] = lambda: None
    ) -> list[Answer]:
        """Several completions at once, in order; all_started is called when each has its first piece."""
        answers: list[Answer | None] = [None] * len(prompts)
        faults: list[BaseException] = []
        left, lock = [len(prompts)], threading.Lock()

        def started() -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                all_started()

        def work(at: int) -> None:
            try:
                answers[at] = self.complete(prompts[at], tokens, started)
            except BaseException as fault:  # told to the caller below
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return [answer for answer in answers if answer is not None]

    def _connection(self) -> _Connection:
        return _Connection(self._host, self._port, timeout=TIMEOUT_S)


class _Connection(http.client.HTTPConnection):
    """Closes itself."""

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def _body(response: http.client.HTTPResponse) -> str:
    return response.read().decode("utf-8", "replace")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)


def _take(answer: Answer, data: dict[str, Any], started: Callable[[], None]) -> None:
    if "error" in data:
        raise DeviceError(f"The server broke off: {data['error']}")
    piece = ""
    for choice in data.get("choices", ())[:1]:
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if piece or choice.get("finish_reason"):
            answer.told_s = answer.told_s or time.perf_counter()
    if piece:
        answer.times_s.append(time.perf_counter())
        answer.text += piece
        if len(answer.times_s) == 1:
            started()
    if usage := data.get("usage"):
        answer.tokens = int(usage.get("completion_tokens") or answer.tokens)
        answer.prompt_tokens = int(usage.get("prompt_tokens") or answer.prompt_tokens)


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """ttft_s: the slowest; sum_tok_s: the streams' decode rates; total_tok_s: all tokens over all time."""
    began, ended = min(a.asked_s for a in answers), max(a.ended_s for a in answers)
    return {
        "ttft_s": max(a.ttft_s for a in answers),
        "sum_tok_s": sum(a.tok_s for a in answers),
        "total_tok_s": sum(a.tokens for a in answers) / (ended - began),
    }
