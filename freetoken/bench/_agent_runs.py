"""Runs agents' sessions through the engine and counts, per request, what is computed again.

Owns the engine and its scripted answers: each answer is forced, so the token lists are the same in every
mode. Without a checkpoint a model of shapes serves: it computes nothing, but its pages and states are real
units, so tree, checkpoints and scheduler work as ever, at any length. Knows no agent.

    anchors  states are saved where blocks of the text begin and end
    none     no anchors: at an answer's end, where prompts part, every 4096 tokens and at the last page
    fixed    every so many tokens, as many as `anchors` saves
"""

from __future__ import annotations

import json
import queue
import shutil
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from freetoken.bench._bound import Ids, common
from freetoken.bench._sessions import Ask
from freetoken.chat.codec import ChatCodec, Prompt
from freetoken.chat.prompt_edit import find_edit
from freetoken.chat.prompt_history import PromptHistory
from freetoken.core.errors import DeviceError
from freetoken.core.generate import PrefixReport
from freetoken.core.options import Options
from freetoken.core.request import Output, SamplingParams, Submit
from freetoken.engine.build import DEMO_MODEL, build

MODES = ("anchors", "none", "fixed")
STATE_BYTES = 16
NUM_SLOTS = 128
"""States in host memory: 8 GiB of a 35B model's."""
_CONTEXT = 1 << 17
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Turn:
    """One request: its tokens, what was computed, seconds on this machine, and why not less.

    decode_s  of the answer's tokens but the first
    """

    prompt: Ids
    answer: Ids
    computed: int
    ttft_s: float
    decode_s: float
    report: PrefixReport


class Codec:
    """Prompts and answers of a session as ids: an answer is written as the template writes the turn back."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec

    def ids_of(self, ask: Ask) -> tuple[Prompt, Ids]:
        codec, conversation = self.codec, ask.conversation
        prompt = codec.encode(conversation)
        after = codec.encode(replace(conversation, messages=(*conversation.messages, ask.said))).ids
        text = codec.tokenizer.decode(after[common(prompt.ids, after) :], skip_special=False)
        if ask.said.reasoning:
            rest = text.partition("</think>")[2].lstrip("\n")
            text = f"{ask.said.reasoning}\n</think>\n\n{rest}"
        end = "<|im_end|>"
        return prompt, codec.tokenizer.encode(text.partition(end)[0] + end)


def model_of_shapes(folder: Path, vocab_size: int = 8192) -> Path:
    """Write a checkpoint of the null family with states, and the demo model's tokenizer."""
    config = {"model_type": "null", "vocab_size": vocab_size, "token_id": 1, "state_bytes": STATE_BYTES}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}), "utf-8")
    header = json.dumps({"unused": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    for name in _TOKENIZER:
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


class Runner:
    """One engine, one mode. interval: tokens between saved states in mode `fixed`."""

    def __init__(self, options: Options, mode: str, interval: int = 4096) -> None:
        self.mode, self.interval = mode, interval
        self._built = build(options)
        self._codec = Codec(self._built.codec)
        self._history = PromptHistory()
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._built.engine.start(self._take)
        self._count = 0

    def _take(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._outputs.put(output)

    @property
    def num_saved(self) -> int:
        return int(self._built.snapshot()["cache"].get("checkpoints_saved", 0))

    @property
    def page_size(self) -> int:
        return self._built.plan.page_size

    def run(self, ask: Ask) -> Turn:
        """Ask, wait for the whole answer, and tell what it took."""
        prompt, answer = self._codec.ids_of(ask)
        asked = self._built.codec.asked(ask.conversation, prompt, ask.group)
        earlier = self._history.remember(asked)
        positions, ids = self._anchors(prompt)
        params = SamplingParams(
            temperature=0.0, max_tokens=len(answer), forced_ids=tuple(map(int, answer)), ignore_eos=True
        )
        name, self._count = f"turn-{self._count}", self._count + 1
        start = time.perf_counter()
        self._built.engine.submit(Submit(name, prompt.ids, params, positions, ids, ask.group))
        first, last, outputs = self._wait(name)
        self._history.answered(asked, answer.tolist())
        edit = find_edit(asked, earlier, partial(self._built.codec.place_of, ask.conversation, prompt))
        got = outputs[0]
        report = PrefixReport(
            len(prompt.ids), edit.shared, edit.cause, edit.where, got.cached_tokens, got.matched_tokens
        )
        computed = len(prompt.ids) - got.cached_tokens
        return Turn(prompt.ids, answer, computed, first - start, last - first, report)

    def _anchors(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.mode == "anchors":
            return prompt.anchor_positions, prompt.anchor_ids
        if self.mode == "fixed":
            return tuple(range(self.interval, len(prompt.ids), self.interval)), ()
        return (), ()

    def _wait(self, name: str) -> tuple[float, float, Sequence[Output]]:
        outputs: list[Output] = []
        first = 0.0
        while True:
            output = self._outputs.get()
            if output.request_id != name:
                continue
            if output.error is not None:
                raise output.error
            first = first or time.perf_counter()
            outputs.append(output)
            if output.finish is not None:
                if not output.token_ids and len(outputs) == 1:
                    raise DeviceError("The engine ended a request without a token.")
                return first, time.perf_counter(), outputs

    def close(self) -> None:
        self._built.engine.close()


def token_rows(agent: str, turns: Sequence[Turn]) -> list[dict[str, object]]:
    """What `_bound` reads."""
    return [
        {"agent": agent, "prompt": t.prompt.tolist(), "answer": np.asarray(t.answer).tolist()} for t in turns
    ]
