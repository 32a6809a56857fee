"""Event streams whose frames name their event and carry it as the data's type: Anthropic's and Responses'."""

from __future__ import annotations

import json
from typing import Any


def events_of(text: str) -> list[dict[str, Any]]:
    """Split frames; each names its event and carries the same type."""
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}", frame
        events.append(event)
    return events
