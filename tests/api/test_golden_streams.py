"""Whole streams, to the letter, one for each protocol.

`python tests/api/test_golden_streams.py` writes them anew.

Ids and times of a run are replaced; all else a client may rely on.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_llm import ScriptedLLM, finish

from freetoken.api.server import serving
from freetoken.chat.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from freetoken.core.options import Options

GOLDEN = Path(__file__).parent / "golden"
USER = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "responses": ("/v1/responses", {"model": "m", "input": "Hi", "stream": True}),
    "messages": ("/v1/messages", {"model": "m", "messages": USER, "max_tokens": 99, "stream": True}),
}


def steps() -> list[Any]:
    """No two neighbours that a busy server might merge."""
    return [
        ReasoningDelta("They want weather."),
        TextDelta("Let me look."),
        ToolCallStart(0, "call_a", "weather"),
        ToolCallDelta(0, '{"city": "Oslo"}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call_b", "clock"),
        ToolCallDelta(1, "{}"),
        ToolCallEnd(1),
        finish("tool_calls", tokens=21, cached=4, reasoning=5),
    ]


def told(http: Any, name: str) -> str:
    path, body = REQUESTS[name]
    text = http.post(path, json=body).text
    text = re.sub(r"[0-9a-f]{32}", "REQUEST", text)
    return re.sub(r'("created(_at)?":)\d+', r"\g<1>0", text)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_is_to_the_letter_what_it_was(serve, name):
    served = serve(lambda _: steps())
    assert told(served.http, name) == (GOLDEN / f"{name}.sse").read_text("utf-8")


def main() -> None:
    import httpx

    GOLDEN.mkdir(exist_ok=True)
    with (
        serving(ScriptedLLM(lambda _: steps()), Options(port=0)) as base,
        httpx.Client(base_url=base) as http,
    ):
        for name in REQUESTS:
            (GOLDEN / f"{name}.sse").write_text(told(http, name), encoding="utf-8")
            print(f"wrote {name}.sse", file=sys.stderr)


if __name__ == "__main__":
    main()
