"""Whose conversation a request belongs to, by the names that agents send: fair shares go by conversation.

A name of one conversation stands alone: `x-claude-code-session-id` (with the sub-agent's id), `session-id`,
`x-session-id`, `x-session-affinity`, `prompt_cache_key`, a session inside Anthropic's `metadata.user_id`. A
name of a person (`user`, `safety_identifier`) may have many conversations, so it is joined with how this one
opens. Owns nothing; what was sent is kept as a digest only. Anything malformed counts as not sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from freetoken.chat.conversation import Conversation
from freetoken.chat.nonces import without_nonces

_HEADERS = ("x-claude-code-session-id", "session-id", "session_id", "x-session-id", "x-session-affinity")
_AGENT_HEADER = "x-claude-code-agent-id"
_SESSION_KEYS = ("session_id", "session", "conversation_id", "thread_id")


class SessionFields(msgspec.Struct, kw_only=True):
    """The fields of any protocol that name a conversation or a person. Typed Any: they only advise."""

    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None


def session_of(headers: Mapping[str, str], body: SessionFields, conversation: Conversation | None) -> str:
    """The conversation's name as a digest, "" if the request names none."""
    named = next((headers[name] for name in _HEADERS if headers.get(name)), "")
    own = [named, _text(body.prompt_cache_key), *_sessions(body.metadata)]
    session = next(filter(None, own), "")
    if session:
        return _digest(session, headers.get(_AGENT_HEADER, ""))
    user = _text(body.user) or _text(body.safety_identifier) or _user_id(body.metadata)
    if not user:
        return ""
    if conversation is None:
        return _digest(user, "")
    opening = replace(conversation, messages=without_nonces(conversation.messages))
    return _digest(user, opening.opening_id)


def _sessions(metadata: object) -> Iterable[str]:
    """Names of a session in `metadata`, or in the JSON or joined text of its user_id."""
    if not isinstance(metadata, Mapping):
        return
    yield from (_text(metadata.get(key)) for key in _SESSION_KEYS)
    user_id = _text(metadata.get("user_id"))
    if user_id.startswith("{"):
        try:
            inner = json.loads(user_id)
        except (ValueError, RecursionError):
            return
        if isinstance(inner, dict):
            yield from (_text(value) for key, value in inner.items() if "session" in key)
    elif "_session_" in user_id:
        yield user_id.rpartition("_session_")[2]


def _user_id(metadata: object) -> str:
    return _text(metadata.get("user_id")) if isinstance(metadata, Mapping) else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
