"""Routing traces of real generations, and what caches of experts make of them.

A trace is one npz: topk uint8 [steps, layers, k], phase uint8 [steps] (0 prefill, 1 decode), step int32 [steps] (position in
the request), request int32 [steps], num_experts. Prefill tokens are thinned to the last `prefill` of each prompt.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from demo.evaluate.decoder import Decoder


class Recorder:
    """Records the router's choices while requests are generated in batches, and stores them request by request."""

    def __init__(self, decoder: Decoder, prefill: int = 64) -> None:
        self.decoder, self.prefill = decoder, prefill
        self.parts: list[tuple[np.ndarray, ...]] = []

    def run(self, prompts: list[str], limit: int = 300) -> None:
        """Generate greedily and keep the routing of each prompt's end and of every token up to <|im_end|>."""
        layers, seen = self.decoder.net.model.layers, [[] for _ in self.decoder.net.model.layers]
        n = len(prompts)
        hooks = [x.mlp.gate.register_forward_hook(lambda m, i, o, s=s: s.append(o[2].view(n, -1, o[2].shape[-1]).to(torch.uint8).cpu())) for x, s in zip(layers, seen, strict=True)]
        mask, made = self.decoder.generate(prompts, limit)
        for h in hooks:
            h.remove()
        topk = torch.stack([torch.cat(s, 1) for s in seen], 2).numpy()  # [n, T + new - 1, layers, k]
        end = self.decoder.tok.eos_token_id
        for row, pads, ids in zip(topk, (mask == 0).sum(1).tolist(), made, strict=True):
            stop = (ids == end).nonzero()
            length = int(stop[0]) if len(stop) else len(ids) - 1
            self._keep(row[pads : mask.shape[1] + length], mask.shape[1] - pads)

    def _keep(self, topk: np.ndarray, prompt: int) -> None:
        """Store one request's choices [tokens, layers, k], of which the first `prompt` tokens are prefill."""
        skip = max(0, prompt - self.prefill)
        step = np.arange(skip, len(topk), dtype=np.int32)
        request = np.full(len(step), len(self.parts), np.int32)
        self.parts.append((topk[skip:], (step >= prompt).astype(np.uint8), step, request))

    def arrays(self, experts: int) -> dict[str, np.ndarray]:
        topk, phase, step, request = (np.concatenate(x) for x in zip(*self.parts, strict=True))
        return dict(topk=topk, phase=phase, step=step, request=request, num_experts=np.int32(experts))


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
        requests=len(set(trace["request"].tolist())), decode_steps=int(steps), overlap_with_previous=round(float(overlap), 3), overlap_if_even=round(k / experts, 3),
        least_used_share=round(float(used.mean(0).min() * experts / k), 3), entropy=[round(float(x), 3) for x in _entropy(used.mean(0))],
    )
    for percent in (37, 11):
        slots = int(layers * experts * percent / 100)
        top = {x for x, _ in Counter(stream[:half]).most_common(slots)}
        out[f"cache_{percent}"] = dict(slots=slots, lru=round(lru(stream, slots), 3), belady=round(belady(stream, slots), 3), static_from_first_half=round(sum(x not in top for x in stream[half:]) / (len(stream) - half), 3))
    return out


def _entropy(share: np.ndarray) -> np.ndarray:
    p = share / share.sum(-1, keepdims=True)
    return -(p * np.log(p + 1e-12)).sum(-1) / np.log(p.shape[-1])
