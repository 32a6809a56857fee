"""Text files of a checkpoint as the chat side reads them: whole, or as one JSON object.

Knows nothing of what they mean. A file that is not there is empty; a damaged one is the checkpoint's error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freetoken.core.errors import WeightsError


def read_text(path: Path, *, code: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise WeightsError(
            f"{path.name} can't be read: {error}.", code=code, hint="Fetch the file again."
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, code="invalid_json"))
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path.name} is not valid JSON: {error}.", code="invalid_json", hint="Fetch the file again."
        ) from error
    return value
