# ruff: noqa: E501 - sentences and small makers read best on one line
"""Routing traces of held-out chats, and what caches of experts make of them.

A trace is one npz: topk uint8 [steps, layers, k], phase uint8 [steps] (0 prefill, 1 decode), step int32 [steps] (position in
the request), request int32 [steps], num_experts int32. Tokens the user, the tools or the system wrote are prefill; tokens the
assistant wrote are decode. Chats are followed rather than generated: the router sees just what it would see while generating
the same text, and a model of perplexity near one would write nearly that.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from demo.chats.chat_format import render
from demo.chats.dice import Dice
from demo.chats.sessions import Chats
from demo.evaluate.decoder import Decoder
from demo.evaluate.perplexity import tokens_of


@torch.no_grad()
def follow(decoder: Decoder, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Choices uint8 [tokens, layers, k] of every layer's router along a chat, and phase uint8 [tokens]."""
    ids, mine = tokens_of(decoder, text, spans)
    seen: list[np.ndarray] = []
    hooks = [
        x.mlp.gate.register_forward_hook(lambda m, i, o: seen.append(o[2].cpu().numpy().astype(np.uint8)))
        for x in decoder.net.model.layers
    ]
    decoder.net.model(ids[None].to(decoder.device))
    for h in hooks:
        h.remove()
    return np.stack(seen, 1), mine.numpy().astype(np.uint8)


def record(decoder: Decoder, d: Dice, decode_steps: int) -> dict[str, np.ndarray]:
    """A trace of short chats and long sessions, until it has so many decode steps."""
    short, long, parts, done = Chats(d), Chats(d, True), [], 0
    while done < decode_steps:
        chat = (long if d.chance(0.1) else short).sample()
        topk, phase = follow(decoder, *render(chat.messages, chat.tools))
        if len(phase) <= 8192:
            done += int(phase.sum())
            parts.append(
                (
                    topk,
                    phase,
                    np.arange(len(phase), dtype=np.int32),
                    np.full(len(phase), len(parts), np.int32),
                )
            )
    topk, phase, step, request = (np.concatenate(x) for x in zip(*parts, strict=True))
    return dict(
        topk=topk,
        phase=phase,
        step=step,
        request=request,
        num_experts=np.int32(decoder.net.config.num_experts),
    )


def lru(requests: Sequence[int], slots: int) -> float:
    """Share of requests that a least-recently-used cache misses."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for x in requests:
        if x in cache:
            cache.move_to_end(x)
            continue
        misses += 1
        cache[x] = None
        if len(cache) > slots:
            cache.popitem(last=False)
    return misses / len(requests)


def belady(requests: Sequence[int], slots: int) -> float:
    """The same for a cache that knows the future: no policy misses less."""
    following, last = [0] * len(requests), {}
    for i in range(len(requests) - 1, -1, -1):
        following[i] = last.get(requests[i], len(requests))
        last[requests[i]] = i
    cache: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    misses = 0
    for i, x in enumerate(requests):
        if x not in cache:
            misses += 1
            while len(cache) >= slots:
                when, y = heapq.heappop(heap)
                if cache.get(y) == -when:
                    del cache[y]
        cache[x] = following[i]
        heapq.heappush(heap, (-following[i], x))
    return misses / len(requests)


def figures(trace: dict[str, np.ndarray]) -> dict[str, object]:
    """Overlap with the previous token, cache misses at 37 and 11 % of the pool, and the least used expert; decode steps only."""
    decode = trace["phase"] == 1
    topk, request = trace["topk"][decode], trace["request"][decode]
    steps, layers, k = topk.shape
    experts = int(trace["num_experts"])
    used = np.zeros((steps, layers, experts), bool)
    np.put_along_axis(used, topk.astype(np.int64), True, -1)
    same = request[1:] == request[:-1]
    overlap = (used[1:] & used[:-1]).sum(-1)[same].mean() / k
    stream = (topk + np.arange(layers)[None, :, None] * experts).reshape(-1).tolist()
    half = len(stream) // 2
    out: dict[str, object] = dict(
        requests=len(set(trace["request"].tolist())),
        decode_steps=int(steps),
        overlap_with_previous=round(float(overlap), 3),
        overlap_if_even=round(k / experts, 3),
        least_used_share=round(float(used.mean(0).min() * experts / k), 3),
        entropy=[round(float(x), 3) for x in _entropy(used.mean(0))],
    )
    for percent in (37, 11):
        slots = int(layers * experts * percent / 100)
        top = {x for x, _ in Counter(stream[:half]).most_common(slots)}
        out[f"cache_{percent}"] = dict(
            slots=slots,
            lru=round(lru(stream, slots), 3),
            belady=round(belady(stream, slots), 3),
            static_from_first_half=round(sum(x not in top for x in stream[half:]) / (len(stream) - half), 3),
        )
    return out


def _entropy(share: np.ndarray) -> np.ndarray:
    p = share / share.sum(-1, keepdims=True)
    return -(p * np.log(p + 1e-12)).sum(-1) / np.log(p.shape[-1])
