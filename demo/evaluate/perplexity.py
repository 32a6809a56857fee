# ruff: noqa: E501 - sentences and small makers read best on one line
"""Perplexity of assistant tokens on held-out chats, by position in long sessions, and how often the draft head is right.

Uses transformers for the trunk. The draft head runs on the trunk's final states through the training model's own layer.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from demo.chats.chat_format import render
from demo.chats.dice import Dice
from demo.chats.sessions import Chats, turns
from demo.evaluate.decoder import Decoder
from demo.training import checkpoint
from demo.training.model import Model


def tokens_of(decoder: Decoder, text: str, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n] and bool [n]: the tokens that the assistant writes."""
    e = decoder.tok(text, return_offsets_mapping=True, add_special_tokens=False)
    begins = torch.tensor([o[0] for o in e["offset_mapping"]])
    mine = torch.zeros(len(begins), dtype=torch.bool)
    for a, b in spans:
        mine |= (begins >= a) & (begins < b)
    return torch.tensor(e["input_ids"]), mine


@torch.no_grad()
def losses(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token after the first; [n - 1]."""
    ids = ids.to(decoder.device)
    logits = decoder.net(ids[None]).logits[0, :-1].float()
    return F.cross_entropy(logits, ids[1:], reduction="none").cpu()


def chat_perplexity(decoder: Decoder, rendered: list[tuple[str, list[tuple[int, int]]]]) -> dict[str, float]:
    """Per token, and per character so that models with other tokenizers compare."""
    total, count, chars = 0.0, 0, 0
    for text, spans in rendered:
        ids, mine = tokens_of(decoder, text, spans)
        ce = losses(decoder, ids)[mine[1:]]
        total, count, chars = total + ce.sum().item(), count + len(ce), chars + sum(b - a for a, b in spans)
    return dict(
        perplexity=round(math.exp(total / count), 4), tokens=count, nats_per_character=round(total / chars, 5)
    )


def held_chats(d: Dice, count: int) -> list[tuple[str, list[tuple[int, int]]]]:
    maker = Chats(d)
    return [render(c.messages, c.tools) for c in (maker.sample() for _ in range(count))]


def by_position(decoder: Decoder, d: Dice, count: int, length: int = 16384) -> dict[str, float]:
    """Assistant perplexity of sessions of `length` tokens over one list of tools, by position."""
    edges = [0, 1024, 2048, 4096, 8192, 12288, 16384]
    sums = [[0.0, 0] for _ in edges]
    for _ in range(count):
        messages, tools = turns(d, False, 130)
        text, spans = render(messages, list({t.name: t.tool for t in tools}.values()))
        ids, mine = (x[:length] for x in tokens_of(decoder, text, spans))
        ce = losses(decoder, ids)
        for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
            part = ce[a:b][mine[1:][a:b]]
            sums[i][0] += part.sum().item()
            sums[i][1] += len(part)
    return {
        f"{a}-{b}": round(math.exp(s / n), 4)
        for (s, n), a, b in zip(sums, edges, edges[1:], strict=False)
        if n
    }


class Drafter:
    """The mtp.* head of a checkpoint beside its trunk."""

    def __init__(self, folder: str, decoder: Decoder) -> None:
        self.decoder, self.model = decoder, Model()
        self.model.load_state_dict(checkpoint.read(Path(folder)))
        self.model.to(decoder.device)

    @torch.no_grad()
    def agreement(self, texts: list[str], spans: list[list[tuple[int, int]]]) -> dict[str, float]:
        """Share of drafted tokens that the trunk would choose itself, on given texts' assistant tokens."""
        right = count = 0
        for text, span in zip(texts, spans, strict=True):
            ids, mine = tokens_of(self.decoder, text, span)
            ids = ids.to(self.decoder.device)
            hidden = self.decoder.net.model(ids[None]).last_hidden_state
            start = torch.zeros(1, len(ids) - 1, dtype=torch.bool, device=ids.device)
            start[0, 0] = True
            drafted, _ = self.model.draft(hidden[:, :-1], ids[None, 1:], self.model.rows(start))
            table = self.model.model.embed_tokens.weight
            draft, own = (F.linear(x, table).argmax(-1)[0].cpu() for x in (drafted, hidden[:, 1:]))
            wanted = mine[2:]
            right += int((draft[:-1] == own[:-1])[wanted].sum())
            count += int(wanted.sum())
        return dict(accepted=round(right / count, 4), tokens=count)
