"""Makes a recorded request fit to be kept: its structure stays, other people's words and all ids go.

Long texts become a short one with a fingerprint, so that equal texts stay equal; folders become
/project; identities become zeros. What our own server said (its ids and signatures) stays.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "content-type", "user-agent", "accept")
LONGEST = 60
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEX = re.compile(r"\b[0-9a-f]{64}\b")
_WHOLE = ("signature", "encrypted_content", "id", "call_id", "tool_use_id", "tool_call_id")
_PROSE = ("description", "title")


def scrub(value: Any, folder: str, key: str = "") -> Any:
    """Return a JSON value with nothing personal and no long text in it."""
    if isinstance(value, Mapping):
        if key == "metadata" and "user_id" in value:
            return {"user_id": json.dumps({"device_id": "0", "account_uuid": "", "session_id": "0"})}
        return {k: scrub(v, folder, k) for k, v in value.items()}
    if isinstance(value, list):
        return [scrub(item, folder, key) for item in value]
    if not isinstance(value, str) or key in _WHOLE:
        return _nameless(value) if isinstance(value, str) else value
    if key in _PROSE or len(value) > LONGEST and folder not in value:
        return f"text {hashlib.sha256(_nameless(value).encode()).hexdigest()[:8]}"
    text = _nameless(value.replace(folder, "/project"))
    return text if len(text) <= 4 * LONGEST else f"text {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def scrub_request(recorded: Mapping[str, Any], folder: str) -> dict[str, Any]:
    headers = {k: v for k, v in recorded["headers"].items() if k in KEPT_HEADERS}
    body = {k: v for k, v in recorded["body"].items() if k not in ("client_metadata", "prompt_cache_key")}
    return {
        "path": recorded["path"],
        "query": recorded["query"],
        "headers": headers,
        "body": scrub(body, folder),
    }


def _nameless(text: str) -> str:
    return _HEX.sub("0" * 64, _UUID.sub("00000000-0000-0000-0000-000000000000", text))
