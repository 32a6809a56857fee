"""Responses kept for `previous_response_id`, in memory, the latest used last to go.

Owns two bounds, on number and on bytes; knows no model. What was dropped, or never stored, is an
error that says so: a conversation is never continued without its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from freetoken.core.errors import NotFoundError, RequestError
from freetoken.core.units import MIB

MAX_RESPONSES = 1000
MAX_BYTES = 64 * MIB


@dataclass(frozen=True)
class Stored:
    """`items`: JSON list of the whole conversation so far, the answer included. `body`: the response."""

    items: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.body)


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, items: list[Any], body: bytes) -> None:
        """Keep a response; the ones not used for longest make room. One that is too large isn't kept."""
        new = Stored(msgspec.json.encode(items), body)
        if new.num_bytes > self._max_bytes:
            return
        self._stored[response_id] = new
        self._num_bytes += new.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, old = self._stored.popitem(last=False)
            self._num_bytes -= old.num_bytes

    def history(self, response_id: str) -> list[Any]:
        """All items up to and with that response's answer; RequestError `previous_response_not_found`."""
        found = self._stored.get(response_id)
        if found is None:
            raise RequestError(
                f"The response {response_id!r} is not stored here (any more).",
                code="previous_response_not_found",
                hint="Send the whole conversation as input.",
                param="previous_response_id",
            )
        self._stored.move_to_end(response_id)
        items: list[Any] = msgspec.json.decode(found.items)
        return items

    def body(self, response_id: str) -> bytes:
        """The response as it was answered; NotFoundError `response_not_found`."""
        found = self._stored.get(response_id)
        if found is None:
            raise NotFoundError(
                f"The response {response_id!r} is not stored here (any more).",
                code="response_not_found",
                hint="The server keeps the latest ones, in memory.",
            )
        return found.body

    def delete(self, response_id: str) -> None:
        self.body(response_id)
        self._num_bytes -= self._stored.pop(response_id).num_bytes
