# ruff: noqa: E501 - sentences and small makers read best on one line
"""Batches for training: generated chats as workers write them, and plain text.

Owns shuffling. A batch is (ids, targets, weights, start), each [rows, T]; weights are 1 where the target is learnt.
"""

import glob
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from demo.training.shards import PAD


def unpack(rows: torch.Tensor, prompt_weight: float = 0.0):
    """int rows [n, T + 1] with flags -> batch; what the model doesn't write itself weighs prompt_weight."""
    ids = (rows & 8191).long()
    learn = ((rows >> 13) & 1).float()[:, 1:]
    start = ((rows >> 14) & 1).bool()[:, :-1].clone()
    start[:, 0] = True
    target = ids[:, 1:].contiguous()
    weight = torch.where(learn > 0, learn, prompt_weight * (target != PAD).float())
    return ids[:, :-1].contiguous(), target, weight, start


def start_workers(
    data: Path, out: Path, count: int, options: dict[str, object], seed: int, held: bool = False
) -> list[subprocess.Popen]:
    """Shard writers with seeds of their own, at low priority."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    flags = [x for k, v in options.items() for x in (f"--{k}", str(v))]
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "demo.training.shards",
        str(data),
        str(out),
        *flags,
        *(["--held"] if held else []),
    ]
    return [subprocess.Popen([*command, "--seed", str(seed + i)], env=environment) for i in range(count)]


class ChatRows:
    """Endless shuffled rows; new shards join as the workers write them."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.seen: set[str] = set()
        self.rows: torch.Tensor | None = None
        self.queue = np.zeros(0, int)
        self.epochs = 0

    def wait(self) -> None:
        while self.rows is None:
            time.sleep(0.2)
            self.poll()

    def poll(self) -> None:
        new = [f for f in sorted(glob.glob(f"{self.folder}/[0-9]*.npy")) if f not in self.seen]
        if not new:
            return
        self.seen.update(new)
        rows = torch.cat([torch.from_numpy(np.load(f)) for f in new]).to(self.device)
        before = 0 if self.rows is None else len(self.rows)
        self.rows = rows if self.rows is None else torch.cat([self.rows, rows])
        self.queue = np.random.permutation(np.concatenate([self.queue, np.arange(before, len(self.rows))]))

    def take(self, n: int) -> torch.Tensor:
        if len(self.queue) < n:
            self.queue = np.random.permutation(len(self.rows))
            self.epochs += 1
        chosen, self.queue = self.queue[:n], self.queue[n:]
        return self.rows[torch.from_numpy(chosen).to(self.device)].int()


class TextRows:
    """Rows cut from the token stream of the corpus at a new offset every epoch."""

    def __init__(self, path: Path, length: int, device: str) -> None:
        self.ids = torch.from_numpy(np.load(path).astype(np.int32)).to(device)
        self.length, self.order, self.at = length, np.zeros(0, int), 0

    def take(self, n: int) -> torch.Tensor:
        if self.at + n > len(self.order):
            count = (len(self.ids) - 2 * self.length - 2) // self.length
            self.order, self.at = (
                np.random.permutation(count) * self.length + np.random.randint(self.length),
                0,
            )
        begins = torch.from_numpy(self.order[self.at : self.at + n]).to(self.ids.device)
        self.at += n
        return self.flagged(self.ids[begins[:, None] + torch.arange(self.length + 1, device=self.ids.device)])

    def first(self, n: int) -> torch.Tensor:
        """n rows from the start for validation, the same ones again where the text is shorter."""
        t = self.length
        have = (len(self.ids) - 1) // t
        return self.flagged(torch.stack([self.ids[i % have * t : i % have * t + t + 1] for i in range(n)]))

    @staticmethod
    def flagged(rows: torch.Tensor) -> torch.Tensor:
        return rows | (1 << 13) | ((rows == PAD).int() << 14)
