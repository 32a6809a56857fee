"""The grammar of Responses event streams, checked on every stream of the suite."""

from __future__ import annotations

import json
from typing import Any

from frames import events_of

ENDS = ("response.completed", "response.incomplete", "response.failed")
HEAD = (
    "id",
    "created_at",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
    "status",
)
COUNTS = ("input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details")


def check(text: str) -> dict[str, Any]:
    """Raise AssertionError unless `text` is a complete stream; return the last event's response."""
    events = events_of(text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ENDS and sum(kind in ENDS for kind in kinds) == 1
    heads = [e["response"] for e in events if "response" in e]
    for head in heads:
        assert all(name in head for name in HEAD)
    assert len({(h["id"], h["created_at"], h["model"]) for h in heads}) == 1
    assert all(h["status"] == "in_progress" and h["output"] == [] for h in heads[:-1])
    last = events[-1]["response"]
    assert kinds[-1] == f"response.{last['status']}"
    items = _items([e for e in events if "response" not in e], broken=last["status"] == "failed")
    if last["status"] == "failed":
        assert last["error"]["code"] and last["error"]["message"]
    else:
        assert all(name in last["usage"] for name in COUNTS)
        assert last["output"] == items, "the final object holds the items as they were told"
    return last


def _items(events: list[dict[str, Any]], *, broken: bool) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    ids: set[str] = set()
    for event in events:
        if event["type"] == "response.output_item.added":
            assert not told, "an item opens while another is open"
            assert event["item"]["id"] not in ids, "an id belongs to one item"
            ids.add(event["item"]["id"])
        told.append(event)
        assert event["output_index"] == len(done)
        if event["type"] == "response.output_item.done":
            done.append(_item(told))
            told = []
    assert broken or not told, "the last item was never done"
    return done


def _item(events: list[dict[str, Any]]) -> dict[str, Any]:
    added, item = events[0]["item"], events[-1]["item"]
    assert events[0]["type"] == "response.output_item.added"
    assert (added["id"], added["type"]) == (item["id"], item["type"])
    assert added.get("status", "in_progress") == "in_progress"
    inner = [(e["type"].removeprefix("response."), e) for e in events[1:-1]]
    assert all(e["item_id"] == item["id"] for _, e in inner)
    kinds = [kind for kind, _ in inner]
    joined = "".join(e["delta"] for kind, e in inner if kind.endswith(".delta"))
    if item["type"] in ("message", "reasoning"):
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        assert added["content"] == []
        middle = [f"{name}.delta"] * (len(kinds) - 3)
        assert kinds == ["content_part.added", *middle, f"{name}.done", "content_part.done"]
        part = item["content"][0]
        assert joined == inner[-2][1]["text"] == inner[-1][1]["part"]["text"] == part["text"]
        assert inner[0][1]["part"]["text"] == ""
        if name == "output_text":
            logprobs = [entry for kind, e in inner if kind.endswith(".delta") for entry in e["logprobs"]]
            assert logprobs == inner[-2][1]["logprobs"] == part["logprobs"]
        else:
            assert item["summary"] == []
    else:
        assert item["call_id"] and item["name"] == added["name"]
        field = "arguments" if item["type"] == "function_call" else "input"
        name = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        assert kinds == [*[f"{name}.delta"] * (len(kinds) - 1), f"{name}.done"]
        assert added[field] == "" and joined == inner[-1][1][field] == item[field]
        if field == "arguments" and item["status"] == "completed":
            assert isinstance(json.loads(item["arguments"]), dict)
    return item
