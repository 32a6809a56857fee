"""FreeTokenError as an error body, OpenAI's unless a protocol has its own; any exception as one of ours.

    {"error": {"message": "what happened. What to do next.", "type": ..., "param": ..., "code": ...}}
`code` is stable; the status is the error's own. Knows no route. Messages never quote prompt text.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from starlette.responses import Response

from freetoken.core.errors import FreeTokenError
from freetoken.core.log import logger

RETRY_AFTER_S = 2
ErrorBody: TypeAlias = Callable[[FreeTokenError], bytes]
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_log = logger("api")


def as_error(exc: BaseException) -> FreeTokenError:
    """Return `exc` itself if it is ours; anything else becomes internal_error and is logged."""
    if isinstance(exc, FreeTokenError):
        return exc
    # Frames only: an exception's own text may quote a prompt.
    frames = "".join(traceback.format_tb(exc.__traceback__))
    _log.error("unexpected %s\n%s", type(exc).__name__, frames)
    return FreeTokenError(
        f"The server failed in a way it does not know ({type(exc).__name__}).",
        hint="The log has the details; `ft doctor --bundle` collects them for a report.",
    )


def error_body(error: FreeTokenError) -> bytes:
    """Encode one error as JSON; the hint is the message's last sentence."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_response(error: FreeTokenError, body: ErrorBody = error_body) -> Response:
    """The whole HTTP answer: body in its protocol's shape, status, and the headers that clients act on."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body(error), error.status, headers, "application/json")
