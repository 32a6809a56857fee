# ruff: noqa: E501 - sentences and small makers read best on one line
"""Train the demo model for a fixed wall time, in one of two phases.

usage: python -m demo.training.train DATA OUT first|long [--seconds 560] [--init FOLDER] [--workers 13] ...

`first` learns from rows of 2048 tokens, half of them plain text at the start. `long` goes on from --init with rows of 8192
tokens, long sessions among them, and trains the draft head beside the trunk, which gets no gradient from it. The schedules
follow the clock, so a slower GPU trains less. OUT receives bf16 shards and log.txt.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from demo.training import checkpoint, kernels
from demo.training.data import ChatRows, TextRows, start_workers, unpack
from demo.training.model import CONFIG, Model
from demo.training.optimiser import Optimiser
from demo.training.routing import LocalityControl, Routing, measure


@dataclass(frozen=True)
class Phase:
    """length, rows: of a batch; lr: peak; flat, floor: the rate falls linearly after `flat` of the time to floor * lr;
    text: share of plain text before and after `switch` of the time; prompt: weight of prompts before it; long: share of long chats."""

    length: int
    rows: int
    lr: float
    flat: float
    floor: float
    text: tuple[float, float]
    switch: float
    prompt: float
    long: float
    draft: bool


PHASES = {
    "first": Phase(2048, 48, 4e-3, 0.5, 0.12, (0.5, 0.1), 0.4, 0.1, 0.0, False),
    "long": Phase(8192, 12, 3.5e-3, 0.3, 0.08, (0.15, 0.06), 0.3, 0.0, 0.35, True),
    "last": Phase(8192, 12, 2.2e-3, 0.1, 0.0, (0.1, 0.1), 0.5, 0.0, 0.3, True),
}


def token_loss(hidden, embedding, target, weight):
    """Weighted sum of cross entropies and of weights."""
    logits = F.linear(hidden, embedding.to(hidden.dtype)).float()
    ce = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), reduction="none").view_as(weight)
    return (ce * weight).sum(), weight.sum()


def agreement(drafted, hidden, embedding, weight):
    """How often the draft for token t + 2 is what the trunk would choose at t + 1; sums over weight > 0."""
    a = F.linear(drafted, embedding.to(hidden.dtype)).argmax(-1)
    b = F.linear(hidden, embedding.to(hidden.dtype)).argmax(-1)
    right = (a[:, :-1] == b[:, 1:]) * weight[:, 1:]
    return right.sum(), weight[:, 1:].sum()


class Trainer:
    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.phase, self.began = a, PHASES[a.phase], time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(a.seed)
        np.random.seed(a.seed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.length, self.rows = a.length or self.phase.length, a.rows or self.phase.rows
        a.out.mkdir(parents=True, exist_ok=True)
        self.log_file = (a.out / "log.txt").open("w")
        self._start_data()
        self._build()

    def log(self, *what: object) -> None:
        line = f"[{time.time() - self.began:6.1f}] " + " ".join(map(str, what))
        print(line, flush=True)
        print(line, file=self.log_file, flush=True)

    def _start_data(self) -> None:
        a, p = self.a, self.phase
        if not (a.data / "text_train.npy").exists():
            self.tokenising = subprocess.Popen(
                [sys.executable, "-m", "demo.corpus.tokens", str(a.data), "text"]
            )
        else:
            self.tokenising = None
        held = dict(length=self.length, shards=1, rows=4 * self.rows, long=p.long)
        self.workers = start_workers(a.data, a.scratch / "held", 1, held, 999, held=True)
        rows = max(2 * self.rows, a.shard_tokens // self.length)
        options = dict(length=self.length, shards=a.shards, rows=rows, long=p.long)
        self.workers += start_workers(a.data, a.scratch / "train", a.workers, options, 1000 * a.seed + 1)

    def _build(self) -> None:
        self.net = Model(use_flex=self.device == "cuda").to(self.device)
        if self.a.init:
            self.net.load_state_dict(checkpoint.read(self.a.init))
        self.log("parameters", sum(p.numel() for p in self.net.parameters()))
        self.loss, self.measure = token_loss, measure
        if self.device == "cuda":
            self.log("kernel errors", kernels.check(self.device))
            self._compile()
            if not self._works():
                self.net.use_flex = False
                torch._dynamo.reset()
                self._compile()
        named = {n: p for n, p in self.net.named_parameters() if self.phase.draft or not n.startswith("mtp.")}
        self.optimiser = Optimiser(named, CONFIG["moe_intermediate_size"])
        targets = (self.a.miss, self.a.overlap, self.device)
        self.control = LocalityControl(CONFIG["num_hidden_layers"], *targets)
        self.draft_control = LocalityControl(1, *targets)

    def _compile(self) -> None:
        torch._dynamo.config.recompile_limit = 32
        for layer in [*self.net.model.layers, *self.net.mtp.layers]:
            layer.compile(dynamic=False)
        self.loss, self.measure = (
            torch.compile(token_loss, dynamic=False),
            torch.compile(measure, dynamic=False),
        )

    def _works(self) -> bool:
        """One step with flex attention, compared with plainly masked attention on the same rows."""
        try:
            ids = torch.randint(0, 8000, (self.rows, self.length), device=self.device)
            start = torch.rand(ids.shape, device=self.device) < 0.004
            start[:, 0] = True
            x = torch.randn(
                self.rows, self.length, CONFIG["hidden_size"], device=self.device, dtype=torch.bfloat16
            )
            attention = self.net.model.layers[3].self_attn
            with self.autocast():
                fast, _ = self.net.model.layers[3](x, self.net.rows(start))
                fast.float().square().mean().backward()
                with torch.no_grad():
                    self.net.use_flex = False
                    plain = x[:2] + attention(
                        self.net.model.layers[3].input_layernorm(x[:2]), self.net.rows(start[:2])
                    )
                    self.net.use_flex = True
                    some = torch.compile(
                        lambda y, rows: y + attention(self.net.model.layers[3].input_layernorm(y), rows)
                    )
                    error = (
                        some(x[:2], self.net.rows(start[:2])) - plain
                    ).float().norm() / plain.float().norm()
            self.net.zero_grad(set_to_none=True)
            self.log("flex attention error", error.item())
            return error.item() < 2e-2
        except Exception as error:  # a compiler that cannot build it must not cost the run
            self.log("flex attention failed", str(error)[:400])
            return False

    def autocast(self):
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    # ------------------------------------------------------------ one step
    def forward(self, batch, train: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Total loss and the figures worth logging."""
        ids, target, weight, start = batch
        table = self.net.model.embed_tokens.weight
        with self.autocast():
            rows = self.net.rows(start)
            hidden, routings = self.net.hidden(ids, rows)
            total, count = self.loss(hidden, table, target, weight)
            ce = total / count.clamp(min=1)
            routed, extra = self.routing(routings, weight, self.control)
            figures = dict(
                ce=ce, balance=routed.balance.mean(), miss=routed.miss.mean(), overlap=routed.overlap.mean()
            )
            loss = ce + extra
            if self.phase.draft:
                drafted, routing = self.net.draft(hidden.detach(), target, rows)
                after, later = torch.roll(target, -1, 1), torch.roll(weight, -1, 1)
                later[:, -1] = 0
                total, count = self.loss(drafted, table.detach(), after, later)
                figures["draft"] = total / count.clamp(min=1)
                loss = loss + figures["draft"] + self.routing([routing], later, self.draft_control)[1]
                if not train:
                    figures["agree"], figures["agree_n"] = agreement(drafted, hidden, table, weight)
        figures["load"] = routed.load
        return loss, {k: v.detach() for k, v in figures.items()}

    def routing(self, routings: list[Routing], weight: torch.Tensor, control: LocalityControl):
        """Figures of some layers' routing, and what it adds to the loss."""
        p, used, z = (torch.stack([getattr(r, name) for r in routings]) for name in ("p", "used", "z"))
        f = self.measure(p, used, z, weight, CONFIG["num_experts_per_tok"])
        return f, self.a.balance * f.balance.mean() + 1e-4 * f.z.mean() + control.loss(f)

    def rate(self, progress: float, step: int) -> float:
        p = self.phase
        fall = 1 - (1 - p.floor) * max(0.0, progress - p.flat) / (1 - p.flat)
        return (self.a.lr or p.lr) * min(1.0, (step + 1) / 100) * max(0.01, fall)

    def batch(self, progress: float):
        p, early = self.phase, progress < self.phase.switch
        n_text = int(p.text[0 if early else 1] * self.rows + np.random.rand())
        parts = [unpack(self.chats.take(self.rows - n_text), p.prompt if early else 0.0)]
        if n_text:
            parts.append(unpack(self.text.take(n_text)))
        return tuple(torch.cat(t) for t in zip(*parts, strict=True))

    def run(self) -> None:
        a = self.a
        if self.device == "cuda":  # compile while the workers write the first chats
            random_rows = (
                torch.randint(0, 8000, (self.rows, self.length + 1), device=self.device).int() | 1 << 13
            )
            for _ in range(2):
                self.forward(unpack(random_rows))[0].backward()
                self.net.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            self.log("compiled")
        if self.tokenising and self.tokenising.wait():
            raise SystemExit("tokenising the corpus failed")
        self.text, self.text_val = (
            TextRows(a.data / f"text_{k}.npy", self.length, self.device) for k in ("train", "val")
        )
        self.chats, self.held = (
            ChatRows(a.scratch / "train", self.device),
            ChatRows(a.scratch / "held", self.device),
        )
        self.chats.wait()
        self.held.wait()
        self.log("text tokens", len(self.text.ids), "chat rows", len(self.chats.rows))
        self._loop()
        for w in self.workers:
            w.terminate()
        self.save()
        self.log("validation", json.dumps(self.validate()))

    def _loop(self) -> None:
        t0 = last = time.time()
        step, seen, sums, deadline, marks = 0, 0, [], self.began + self.a.seconds, [0.5, 2.0]
        while step < self.a.steps and (progress := (time.time() - t0) / (deadline - t0)) < 1:
            if progress > marks[0]:
                marks.pop(0)
                self.save()
                self.log("validation", json.dumps(self.validate()))
            if step % 40 == 0:
                self.chats.poll()
            lr = self.rate(progress, step)
            loss, figures = self.forward(self.batch(progress))
            loss.backward()
            self.optimiser.step(lr)
            step += 1
            seen += self.rows * self.length
            sums.append(torch.stack([v for k, v in figures.items() if k != "load"]))
            if step in (1, 20, 100) or step % 200 == 0:
                values = torch.stack(sums).mean(0).tolist()
                now = time.time()
                text = " ".join(
                    f"{k} {v:.4f}" for k, v in zip((k for k in figures if k != "load"), values, strict=True)
                )
                speed = len(sums) * self.rows * self.length / (now - last) / 1e3
                self.log(
                    f"step {step} p {progress:.3f} lr {lr:.1e} {text} {speed:.0f}k tok/s {seen / 1e6:.0f}M rows {len(self.chats.rows)} epoch {self.chats.epochs}"
                )
                last, sums = now, []
                if not math.isfinite(values[0]):
                    raise SystemExit("the loss is not finite")

    def validate(self) -> dict[str, object]:
        """Losses on held-out text and chats with the training graphs, and how evenly experts are used."""
        result: dict[str, object] = {}
        for name, rows in (("text", self.text_val.first(self.rows)), ("chat", self.held.rows.int())):
            ce, agree, agree_n, loads = [], 0.0, 0.0, 0
            for at in range(0, len(rows) - self.rows + 1, self.rows):
                _, f = self.forward(unpack(rows[at : at + self.rows]), train=False)
                ce.append(f["ce"].item())
                loads = loads + f["load"]
                agree, agree_n = agree + float(f.get("agree", 0)), agree_n + float(f.get("agree_n", 0))
                result |= {f"{name}_{k}": round(f[k].item(), 3) for k in ("miss", "overlap")}
            share = loads / loads.sum(-1, keepdim=True)
            result[name] = round(sum(ce) / max(1, len(ce)), 4)
            result[f"{name}_least"] = round(share.min().item() * share.shape[-1], 3)
            if agree_n:
                result[f"{name}_draft_agrees"] = round(agree / agree_n, 4)
        for name in ("strength", "against"):
            result[name] = [round(x, 4) for x in getattr(self.control, name).tolist()]
        return result

    def save(self) -> None:
        self.log("saved", checkpoint.write(self.net.state_dict(), self.a.out), "shards")


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("data", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("phase", choices=PHASES)
    ap.add_argument("--init", type=Path)
    ap.add_argument("--scratch", type=Path, default=Path("demo-shards"))
    numbers = dict(
        seconds=560.0,
        lr=0.0,
        workers=13,
        shards=34,
        shard_tokens=1 << 20,
        steps=10**9,
        seed=1,
        balance=0.02,
        miss=0.25,
        overlap=0.0,
        length=0,
        rows=0,
    )
    for name, value in numbers.items():
        ap.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    Trainer(ap.parse_args()).run()


if __name__ == "__main__":
    main()
