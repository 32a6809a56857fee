"""The admin endpoints of a running server, with http.client alone.

Errors are the server's own, with its codes. Knows no endpoint by name.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from freetoken.cli._remote import first_key
from freetoken.core.errors import BusyError, ConfigError, FreeTokenError, RequestError

TIMEOUT_S = 90.0
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Admin:
    """One server."""

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        self.host, self.port = _LOCAL.get(host, host), port
        key = first_key(api_key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        headers = {**self._headers, **({"Content-Type": "application/json"} if body else {})}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"No server answers at {self.host}:{self.port}: {error}.",
                code="no_server",
                hint="Start one with: ft serve. Another address goes into --host and --port.",
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"What listens at {self.host}:{self.port} is no FreeToken server.",
                code="no_server",
                hint="Give its address with --host and --port.",
            ) from error
        finally:
            connection.close()
        if response.status != 200 or not isinstance(answer, dict):
            raise _error(response.status, answer)
        return answer


def _error(status: int, answer: Any) -> FreeTokenError:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return FreeTokenError(f"The server answered {status}.", code="bad_answer")
    kind = BusyError if status == 503 else RequestError
    return kind(str(error.get("message")), code=str(error.get("code") or "bad_answer"))
