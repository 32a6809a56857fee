# ruff: noqa: E501 - sentences and small makers read best on one line
"""Generated chats as packed rows of tokens, written shard by shard.

usage: python -m demo.training.shards DATA OUT --seed 1 --length 2048 --shards 27 --rows 512 [--long 0.5] [--held]

A row is length + 1 values of int16: token id | learn << 13 | start of a document << 14. Documents are never cut; rows end in
padding. Workers with different seeds write side by side; a file appears under its final name only when it is whole.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo.chats.chat_format import render
from demo.chats.dice import Dice, load_lexicon
from demo.chats.sessions import Chats
from demo.chats.tasks import schema_printer

PAD, LEARN, START = 8183, 1 << 13, 1 << 14


def encode_chats(tok: Tokenizer, rendered: list[tuple[str, list[tuple[int, int]]]]) -> Iterator[np.ndarray]:
    """int16 tokens of each chat with their flags."""
    for (_, spans), e in zip(rendered, tok.encode_batch([t for t, _ in rendered]), strict=True):
        ids = np.array(e.ids, np.int16)
        begins = np.array([o[0] for o in e.offsets])
        for a, b in spans:
            ids[np.searchsorted(begins, a) : np.searchsorted(begins, b)] |= LEARN
        ids[0] |= START
        yield ids


class Packer:
    """Fills rows from a pool of documents, first fit."""

    def __init__(self, tok: Tokenizer, chats: list[Chats], shares: list[float], length: int) -> None:
        self.tok, self.chats, self.shares, self.length = tok, chats, shares, length + 1
        self.pool: list[np.ndarray] = []

    def _refill(self) -> None:
        rendered = []
        for _ in range(96):
            maker = self.chats[0].d.r.choices(self.chats, self.shares)[0]
            chat = maker.sample()
            rendered.append(render(chat.messages, chat.tools, schema_printer(maker.d)))
        self.pool += [d for d in encode_chats(self.tok, rendered) if len(d) <= self.length]

    def row(self) -> np.ndarray:
        parts, left = [], self.length
        while left >= 24:
            if len(self.pool) < 48:
                self._refill()
            at = next((i for i, d in enumerate(self.pool) if len(d) <= left), None)
            if at is None:
                break
            parts.append(self.pool.pop(at))
            left -= len(parts[-1])
        if left:
            padding = np.full(left, PAD, np.int16)
            padding[0] |= START
            parts.append(padding)
        return np.concatenate(parts)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("data", type=Path)
    ap.add_argument("out", type=Path)
    for name, value in dict(seed=1, length=2048, shards=27, rows=512, long=0.0).items():
        ap.add_argument(f"--{name}", type=type(value), default=value)
    ap.add_argument("--held", action="store_true")
    a = ap.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    d = Dice(load_lexicon(a.data / "lexicon.json.xz"), a.seed, a.held)
    packer = Packer(
        Tokenizer.from_file(str(a.data / "tokenizer.json")),
        [Chats(d), Chats(d, True)],
        [1 - a.long, a.long],
        a.length,
    )
    a.out.mkdir(parents=True, exist_ok=True)
    for s in range(a.shards):
        temporary, final = a.out / f".{a.seed}_{s}.npy", a.out / f"{a.seed}_{s}.npy"
        np.save(temporary, np.stack([packer.row() for _ in range(a.rows)]))
        temporary.rename(final)


if __name__ == "__main__":
    main()
