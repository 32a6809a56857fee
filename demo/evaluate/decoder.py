"""Greedy generation with transformers, and the reading of calls in generated text.

Knows nothing about cases. Weights are bf16 in the checkpoint and computed in float32.
"""

import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.chats.chat_format import as_text, prompt_end, render

_CALL = re.compile(r"<tool_call>\s*<function=([^>]*)>(.*?)</function>\s*</tool_call>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.S)


def read_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """(name, arguments as text) of each call in order."""
    return [(name, dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(text)]


def as_written(calls: list[tuple[str, dict]]) -> list[tuple[str, dict[str, str]]]:
    """Expected calls with their arguments as text, to compare with read_calls."""
    return [(name, {k: as_text(v) for k, v in args.items()}) for name, args in calls]


def to_message(text: str, thinking: bool) -> dict:
    """A generated reply as a message that renders to the same text."""
    reasoning, _, body = text.rpartition("</think>") if thinking else ("", "", text)
    content = _CALL.sub("", body).strip()
    return dict(
        role="assistant", content=content, calls=read_calls(body), reasoning=reasoning.strip() or None
    )


def prompt_of(messages: list[dict], tools: list[dict] | None, thinking: bool) -> str:
    return render(messages, tools)[0] + prompt_end(thinking)


class Decoder:
    """A loaded checkpoint; `reply` continues prompts greedily up to <|im_end|>."""

    def __init__(
        self, folder: str, batch: int = 32, device: str = "cpu", experts: str = "grouped_mm"
    ) -> None:
        self.device = device
        self.tok = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.net = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=experts)
            .to(device)
            .eval()
        )
        self.batch = batch

    @torch.no_grad()
    def reply(self, prompts: list[str], limit: int = 240) -> list[str]:
        out = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for at in range(0, len(order), self.batch):
            chosen = order[at : at + self.batch]
            inputs = self.tok(
                [prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False
            ).to(self.device)
            made = self.net.generate(
                **inputs, max_new_tokens=limit, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            for i, ids in zip(chosen, made[:, inputs["input_ids"].shape[1] :], strict=True):
                out[i] = self.tok.decode(ids, skip_special_tokens=True)
        return out
