"""Every error that a user can meet, as one tree with stable codes.

    FreeTokenError                 code, message, hint (the next step), http status
      ConfigError          400     an option, config file or environment value is wrong
      CapacityError        507     something does not fit; the message shows the sum
      WeightsError         422     a checkpoint is missing, damaged or unknown
      RequestError         400     one request is wrong; other requests go on
        ContextLengthError 400     prompt (+ max_tokens) longer than the limit
        UnauthorizedError  401     the API key is missing or wrong
        ForbiddenError     403     a web page or a foreign host name may not call this server
        NotFoundError      404     no such path or model
        MethodError        405     the path exists, the HTTP method doesn't fit it
        TooSlowError       408     the request body did not arrive in time
        TooLargeError      413     the request body is larger than the server reads
        TooManyError       429     one key (or one client) has too many requests running
      BusyError            503     the engine can't take this now (loading, draining, failed)
      DeviceError          500     a device failed; every request in flight fails with it

Each API protocol renders the same object in its own shape; the CLI prints `message` and `hint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FreeTokenError(Exception):
    """Base of the tree. `code` is stable and machine-readable, `hint` says what to do next."""

    default_code = "internal_error"
    status = 500
    exit_code = 1

    def __init__(
        self, message: str, *, code: str | None = None, hint: str = "", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(FreeTokenError):
    default_code = "invalid_config"
    status = 400
    exit_code = 2


class CapacityError(FreeTokenError):
    default_code = "does_not_fit"
    status = 507
    exit_code = 3


class WeightsError(FreeTokenError):
    default_code = "invalid_checkpoint"
    status = 422
    exit_code = 4


class RequestError(FreeTokenError):
    default_code = "invalid_request"
    status = 400


class ContextLengthError(RequestError):
    """The prompt does not fit the context window."""

    default_code = "context_length_exceeded"

    def __init__(self, used: int, limit: int, *, max_tokens: int = 0, param: str = "messages") -> None:
        wanted = f"you requested {used + max_tokens} tokens"
        if max_tokens:
            wanted += f" ({used} in the prompt, {max_tokens} in the answer)"
        elif used == limit:
            wanted += ", which leaves no room for an answer"
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, {wanted}.",
            hint="Shorten the prompt or lower max_tokens.",
            param=param,
        )
        self.used = used
        self.limit = limit
        self.max_tokens = max_tokens


class UnauthorizedError(RequestError):
    default_code = "invalid_api_key"
    status = 401


class ForbiddenError(RequestError):
    default_code = "forbidden"
    status = 403


class NotFoundError(RequestError):
    default_code = "not_found"
    status = 404


class MethodError(RequestError):
    default_code = "method_not_allowed"
    status = 405


class TooLargeError(RequestError):
    default_code = "request_too_large"
    status = 413


class TooSlowError(RequestError):
    default_code = "request_timeout"
    status = 408


class TooManyError(RequestError):
    default_code = "too_many_requests"
    status = 429


class BusyError(FreeTokenError):
    default_code = "unavailable"
    status = 503


class DeviceError(FreeTokenError):
    default_code = "device_failed"
    status = 500
    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` with the closest known names, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(found)}?" if found else ""
