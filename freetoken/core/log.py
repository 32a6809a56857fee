"""One way to say things to the operator: the `freetoken` logger, as text or as JSON lines.

Nothing here ever carries prompt or answer text; a request's log line holds counts and times only.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from freetoken.core.errors import ConfigError


def logger(room: str) -> logging.Logger:
    return logging.getLogger(f"freetoken.{room}")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created)),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("freetoken."),
            "message": record.getMessage(),
        }
        return json.dumps(body, ensure_ascii=False)


def configure(level: str = "info", path: str | None = None, as_json: bool = False) -> None:
    """Send the `freetoken` logger to stderr, or to `path`; called once by a command.

    Raises ConfigError `unwritable_file`.
    """
    try:
        handler: logging.Handler = (
            logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler(sys.stderr)
        )
    except OSError as e:
        raise ConfigError(
            f"The log cannot be written to {path}: {e.strerror}.",
            code="unwritable_file",
            hint="Name a file in a folder that you may write to with --log-file.",
            param="log_file",
        ) from e
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    root = logging.getLogger("freetoken")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
