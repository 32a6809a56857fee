# ruff: noqa: E501 - sentences and small makers read best on one line
"""ChatML with Qwen3.5-style tool calls: text of a chat, and which characters of it the model learns to write.

Owns the training-side rendering; it must equal chat_template.jinja beside it (a test checks that). Messages are dicts with
`role` and `content`; an assistant may add `calls` [(name, arguments)] and `reasoning`.
"""

import json
from collections.abc import Callable
from pathlib import Path

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
HOWTO = (
    "To call a function, reply in this format:\n\n<tool_call>\n<function=NAME>\n<parameter=PARAM>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>"
)


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: object) -> str:
    """A parameter's value as it stands between <parameter> marks: strings bare, everything else as JSON."""
    return value if isinstance(value, str) else to_json(value)


def call_text(calls: list[tuple[str, dict]]) -> str:
    out = []
    for name, arguments in calls:
        lines = "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in arguments.items())
        out.append(f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>")
    return "\n".join(out)


class _Writer:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.length = 0

    def put(self, text: str, learn: bool = False) -> None:
        if learn and text:
            self.spans.append((self.length, self.length + len(text)))
        self.parts.append(text)
        self.length += len(text)


def _head(w: _Writer, system: str, tools: list[dict] | None, dump: Callable[[object], str]) -> None:
    if tools:
        listed = "".join("\n" + dump(t) for t in tools)
        w.put(
            f"<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>{listed}\n</tools>\n\n{HOWTO}"
        )
        w.put(("\n\n" + system if system else "") + "<|im_end|>\n")
    elif system:
        w.put(f"<|im_start|>system\n{system}<|im_end|>\n")


def _assistant(w: _Writer, message: dict, current: bool) -> None:
    w.put("<|im_start|>assistant\n")
    if current:
        reasoning = (message.get("reasoning") or "").strip()
        if reasoning:
            w.put("<think>\n")
            w.put(reasoning + "\n</think>\n\n", True)
        else:
            w.put("<think>\n\n</think>\n\n")
    content, calls = (message.get("content") or "").strip(), message.get("calls") or []
    gap = "\n\n" if content and calls else ""
    w.put(content + gap + call_text(calls) + "<|im_end|>", True)
    w.put("\n")


def render(messages: list[dict], tools: list[dict] | None = None, dump: Callable[[object], str] = to_json):
    """Text of a chat and its (start, end) character spans to learn. `dump` prints a tool's schema."""
    w = _Writer()
    system = messages[0]["content"].strip() if messages and messages[0]["role"] == "system" else ""
    _head(w, system, tools, dump)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "user":
            w.put(f"<|im_start|>user\n{m['content'].strip()}<|im_end|>\n")
        elif m["role"] == "assistant":
            _assistant(w, m, i > last_user)
        elif m["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                w.put("<|im_start|>user")
            w.put(f"\n<tool_response>\n{m['content'].strip()}\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                w.put("<|im_end|>\n")
    return "".join(w.parts), w.spans


def prompt_end(thinking: bool) -> str:
    """What the template adds with add_generation_prompt."""
    return "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def to_openai(messages: list[dict]) -> list[dict]:
    """The same messages in the form that chat templates of transformers take."""
    out = []
    for m in messages:
        d = {"role": m["role"], "content": m.get("content") or ""}
        if m.get("reasoning"):
            d["reasoning_content"] = m["reasoning"]
        if m.get("calls"):
            d["tool_calls"] = [
                {"type": "function", "function": {"name": n, "arguments": a}} for n, a in m["calls"]
            ]
        out.append(d)
    return out
