"""The grammar of Anthropic's event streams, checked on every stream of the suite."""

from __future__ import annotations

import json
from typing import Any

from frames import events_of

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
EMPTY = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"}


def check(text: str) -> dict[str, Any]:
    """Raise AssertionError unless `text` is a complete stream; return the message that it tells."""
    events = [event for event in events_of(text) if event["type"] != "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    start, delta = events[0], events[-2]
    assert start["type"] == "message_start"
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
    assert message["type"] == "message" and message["role"] == "assistant" and message["id"]
    assert isinstance(message["usage"]["input_tokens"], int)
    blocks = _blocks(events[1:-2])
    assert delta["delta"]["stop_reason"] in REASONS
    assert (delta["delta"]["stop_reason"] == "stop_sequence") == (delta["delta"]["stop_sequence"] is not None)
    assert delta["usage"]["output_tokens"] >= 0
    broken = delta["delta"]["stop_reason"] in ("max_tokens", "model_context_window_exceeded")
    for i, block in enumerate(blocks):
        if block["type"] == "tool_use":
            block["input"] = _input(block.pop("json"), broken and i == len(blocks) - 1)
            assert broken or delta["delta"]["stop_reason"] in ("tool_use", "stop_sequence")
    return {**message, "content": blocks, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    is_open = signed = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open, "a block opens while another is open"
            assert event["index"] == len(blocks), "indices rise by one"
            block = event["content_block"]
            assert {k: block[k] for k in EMPTY[block["type"]]} == EMPTY[block["type"]]
            blocks.append({**block, **({"json": ""} if block["type"] == "tool_use" else {})})
            is_open, signed = True, False
            continue
        assert is_open and event["index"] == len(blocks) - 1, "only the open block changes"
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            assert block["type"] != "thinking" or (signed and block["signature"]), "thoughts are signed"
            is_open = False
            continue
        assert event["type"] == "content_block_delta", event["type"]
        assert not signed, "the signature is a block's last delta"
        kind = event["delta"]["type"]
        field = DELTAS[block["type"]][kind]
        signed = kind == "signature_delta"
        block["json" if field == "partial_json" else field] += event["delta"][field]
    assert not is_open, "the last block was never closed"
    return blocks


def _input(text: str, may_break_off: bool) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        assert may_break_off, f"the arguments of a whole call don't parse: {text}"
        return {}
    assert isinstance(value, dict)
    return value
