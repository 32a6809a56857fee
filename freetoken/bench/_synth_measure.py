"""What a synthetic checkpoint's routing is like, found by running it: misses, overlap, recall, the walk.

Runs the engine on the CPU over the first layers of the files as written (hard links under a config with fewer
layers), a prompt of the walk and greedy decoding behind it. Rows are routed as in serving; nothing is assumed
about the weights but that a norm's weights are the same in all layers, as these checkpoints have them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from freetoken.bench._engine import Driven
from freetoken.bench._synth_files import INDEX, shard_name
from freetoken.core.batch import Batch
from freetoken.core.interfaces import ExpertBackend, Routing
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.weights.load import open_checkpoint

SHARES = (0.37, 0.11)
Ids = NDArray[np.int64]


@dataclass
class Watched:
    """Routing as it came: per MoE layer, ids [T, k] of each call, and what the layer before foretold."""

    ids: list[list[Ids]] = field(default_factory=list)
    foretold: list[list[Ids]] = field(default_factory=list)


class Watch(ExpertBackend):
    """Wraps a backend; notes who was routed, and who the next router would choose on this layer's input."""

    def __init__(self, inner: ExpertBackend, routers: list[Tensor], top_k: int) -> None:
        self.inner, self.name, self.stats = inner, inner.name, inner.stats
        inner.on_routing = lambda layer, ids: None  # recorded steps would pass the watch by
        self.seen = Watched([[] for _ in routers], [[] for _ in routers])
        self._routers, self._top_k = routers, top_k

    def begin(self, layer: int, x: Tensor, routing: Routing, batch: Batch) -> None:
        self._note(layer, x, routing)
        self.inner.begin(layer, x, routing, batch)

    def finish(self, layer: int) -> Tensor:
        return self.inner.finish(layer)

    def stream_layer(self, layer: int, x: Tensor, routing: Routing) -> Generator[None, None, Tensor]:
        self._note(layer, x, routing)
        return self.inner.stream_layer(layer, x, routing)

    def begin_job(self, num_tokens: int) -> None:
        self.inner.begin_job(num_tokens)

    def end_job(self) -> None:
        self.inner.end_job()

    def end_step(self, step_s: float) -> None:
        self.inner.end_step(step_s)

    def close(self) -> None:
        self.inner.close()

    def _note(self, layer: int, x: Tensor, routing: Routing) -> None:
        self.seen.ids[layer].append(routing.ids.cpu().numpy().astype(np.int64))
        if layer + 1 < len(self._routers):
            logits = x.float() @ self._routers[layer + 1].T
            self.seen.foretold[layer + 1].append(logits.topk(self._top_k, -1).indices.numpy())


def measure(path: Path, router: str, layers: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Facts of the first `layers` layers; `tokens` decode behind a prompt of `prompt`."""
    walk = json.loads((path / "walk.json").read_text("utf-8"))["ids"]
    with _first_layers(path, layers) as part:
        built = build(Options(model=str(part), device="cpu", max_model_len=prompt + tokens + 8))
        moe, count = built.config.moe, built.config.num_moe_layers
        assert moe is not None
        source = open_checkpoint(part).source
        routers = [source.read(f"model.layers.{i}.{router}.weight").float() for i in range(count)]
        watch = Watch(built.engine.runner.experts, routers, moe.top_k)
        built.engine.runner.experts = watch
        with Driven(built) as engine:
            asked = engine.submit(walk[:prompt], tokens, logprobs=2)
            engine.wait([asked])
        source.close()
    reads = _reads(watch.seen.ids, prompt)
    ahead = [
        len(np.intersect1d(a, b)) / len(a)
        for real, guessed in zip(watch.seen.ids[1:], watch.seen.foretold[1:], strict=True)
        for a, b in zip(np.concatenate(real)[prompt:], np.concatenate(guessed)[prompt:], strict=True)
    ]
    tops = [p.top for p in asked.logprobs if len(p.top) > 1]
    follow = walk[prompt : prompt + tokens]
    facts: dict[str, Any] = {"measured_layers": count, "experts": moe.num_experts, "top_k": moe.top_k}
    for share in SHARES:
        facts[f"lru_misses_{round(100 * share)}"] = round(
            lru_misses(reads, int(share * count * moe.num_experts), prompt), 4
        )
    facts["step_overlap"] = round(overlap(reads[prompt:]), 4)
    facts["prediction_recall"] = round(float(np.mean(ahead)), 4) if ahead else None
    facts["follows_walk"] = round(sum(a == b for a, b in zip(asked.ids, follow, strict=False)) / tokens, 4)
    facts["lead_logits"] = round(float(np.median([t[0][1] - t[1][1] for t in tops])), 3) if tops else None
    return facts


def lru_misses(reads: list[list[int]], slots: int, warm: int) -> float:
    """Share of misses of one LRU over all layers, counted behind the first `warm` tokens."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = asked = 0
    for at, step in enumerate(reads):
        for expert in step:
            hit = expert in held
            if hit:
                held.move_to_end(expert)
            else:
                held[expert] = None
                if len(held) > max(slots, 1):
                    held.popitem(last=False)
            if at >= warm:
                missed, asked = missed + (not hit), asked + 1
    return missed / max(asked, 1)


def overlap(reads: list[list[int]]) -> float:
    """Share of a token's experts that the token before had, too."""
    shares = [len({*a} & {*b}) / len(b) for a, b in zip(reads, reads[1:], strict=False)]
    return float(np.mean(shares)) if shares else 0.0


def _reads(ids: list[list[Ids]], prompt: int) -> list[list[int]]:
    """Per token, the global ids of its experts, layer by layer."""
    layers = [np.concatenate(calls) for calls in ids]
    width = max(int(layer.max()) for layer in layers) + 1
    return [
        [n * width + int(e) for n, layer in enumerate(layers) for e in layer[t]]
        for t in range(len(layers[0]))
    ]


@contextmanager
def _first_layers(path: Path, layers: int) -> Iterator[Path]:
    """The checkpoint cut to its first layers, as links beside it."""
    raw = json.loads((path / "config.json").read_text("utf-8"))
    whole = int(raw["num_hidden_layers"])
    if layers >= whole:
        yield path
        return
    files = [shard_name(i, whole + 1) for i in range(layers + 1)]
    index = json.loads((path / INDEX).read_text("utf-8"))
    part = Path(tempfile.mkdtemp(prefix=".measure-", dir=path))
    try:
        for name in (*files, "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            try:
                os.link(path / name, part / name)
            except OSError:  # a file system without links
                shutil.copyfile(path / name, part / name)
        index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v in files}
        (part / INDEX).write_text(json.dumps(index), "utf-8")
        (part / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": layers}), "utf-8")
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
