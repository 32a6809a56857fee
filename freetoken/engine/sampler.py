"""Logits into tokens, row by row. Owns the device buffer of last tokens; knows no request.

A draw depends on (seed, position) and the row's own logits only, so batch composition, chunking and
preemption never change it. Order: bias, penalties, temperature, top-k, top-p, min-p, draw.
Reported log probabilities are the model's own, before any of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.core.request import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
NEVER = -3e38


@dataclass(frozen=True)
class Draw:
    """What one row needs to draw its token.

    row        row of the last-token buffer
    position   absolute position of the token to draw
    history    int32 [n] prompt and output ids, num_prompt of them the prompt; None if not needed
    forced_id  emit this id whatever the logits say (-1 = draw)
    banned     ids that may not be drawn now
    mask       int32 [ceil(V / 32)] bits of the ids that may be drawn; None = all
    """

    params: SamplingParams
    row: int
    position: int
    history: np.ndarray | None = None
    num_prompt: int = 0
    forced_id: int = -1
    banned: tuple[int, ...] = ()
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Sampled:
    """Tokens of one step on their way to the host; both int64 [R], there once `event` is over.

    ids   what was drawn; bad is 1 where the logits were not finite
    """

    ids: Tensor
    bad: Tensor
    logprobs: tuple[TokenLogprob | None, ...]
    event: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[bool]]:
        """Wait for this step alone, whatever was launched after it."""
        if self.event is not None:
            self.event.synchronize()
        return self.ids.tolist(), [bool(b) for b in self.bad.tolist()]


def uniform(seed: int, position: int) -> float:
    """Return a number in (0, 1) from (seed, position): SplitMix64 (Steele et al. 2014), 52 bits."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    z ^= z >> 31
    return ((z >> 12) + 0.5) / (1 << 52)


class Sampler:
    """Draws tokens and leaves them in `last_tokens` int64 [max_rows], where the next forward reads."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled:
        """Draw one token for each row of `logits` float32 [R, V]. Never waits for the device unless
        log probabilities are wanted."""
        bad = ~torch.isfinite(logits.sum(-1))  # any NaN or infinity makes the sum one; cheaper than a mask
        ids = _argmax(logits)
        for i, draw in enumerate(draws):
            if draw.forced_id >= 0:
                ids[i] = draw.forced_id
            elif not _is_greedy(draw):
                ids[i] = draw_token(logits[i], draw)
        self.last_tokens[upload([d.row for d in draws], logits.device)] = ids
        logprobs = tuple(_logprobs(logits[i], ids[i], d) for i, d in enumerate(draws))
        if logits.device.type == "cpu":
            return Sampled(ids, bad, logprobs)
        host = torch.empty(2, len(draws), dtype=torch.int64, pin_memory=True)
        host.copy_(torch.stack([ids, bad.long()]), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Sampled(host[0], host[1], logprobs, event)


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on the device, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _argmax(logits: Tensor) -> Tensor:
    """int64 [R]; the lowest id wins a tie. numpy's is twelve times as fast as torch's on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _is_greedy(draw: Draw) -> bool:
    p = draw.params
    return (
        p.temperature == 0
        and draw.forced_id < 0
        and not p.logit_bias
        and not draw.banned
        and draw.mask is None
        and (draw.history is None or not _penalised(p))
    )


def _penalised(p: SamplingParams) -> bool:
    return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


def draw_token(logits: Tensor, draw: Draw) -> Tensor:
    """Draw one id from float32 [V] logits; int64 scalar."""
    p = draw.params
    logits = adjust(logits, draw)
    if p.temperature == 0:
        return logits.argmax(-1)
    scaled = logits / p.temperature
    if p.top_k > 0 and p.top_k < logits.shape[-1]:
        values, order = scaled.topk(p.top_k)
    elif p.top_p < 1 or p.min_p > 0:
        values, order = scaled.sort(descending=True, stable=True)
    else:
        return _pick(scaled.double().softmax(-1), uniform(p.seed, draw.position))
    probs = values.double().softmax(-1)
    keep = probs.cumsum(-1) - probs < p.top_p
    keep &= probs >= p.min_p * probs[0]
    keep[0] = True
    return order[_pick(probs * keep, uniform(p.seed, draw.position))]


def _pick(weights: Tensor, u: float) -> Tensor:
    """Invert the cumulative distribution of non-negative float64 [n] weights at u."""
    total = weights.cumsum(-1)
    index = torch.searchsorted(total, u * total[-1:], right=True)[0]
    return index.clamp(max=weights.shape[-1] - 1)


def adjust(logits: Tensor, draw: Draw) -> Tensor:
    """Apply bias, bans and penalties; returns a new float32 [V]."""
    p = draw.params
    logits = logits.clone()
    if p.logit_bias:
        at = torch.tensor([i for i, _ in p.logit_bias], device=logits.device)
        logits[at] += torch.tensor([b for _, b in p.logit_bias], dtype=logits.dtype, device=logits.device)
    if draw.banned:
        logits[list(draw.banned)] = -torch.inf
    if draw.history is not None and _penalised(p):
        _penalise(logits, draw)
    if draw.mask is not None:
        logits += mask_bias(draw.mask, logits.shape[-1]).to(logits.device)
    return logits


def mask_bias(mask: np.ndarray, vocab_size: int) -> Tensor:
    """Unpack a bit mask to float32 [V]: 0 where allowed, NEVER elsewhere and beyond the mask.

    Adding is several times as fast as filling by a mask, and a finite value makes no NaN here.
    """
    flags = np.zeros(vocab_size, np.uint8)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    flags[: len(bits)] = bits
    return torch.from_numpy(flags).float().sub_(1).mul_(-NEVER)


def _penalise(logits: Tensor, draw: Draw) -> None:
    """Repetition looks at prompt and output; presence and frequency at the output alone."""
    assert draw.history is not None
    p = draw.params
    if p.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(draw.history).astype(np.int64)).to(logits.device)
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / p.repetition_penalty, found * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        ids, counts = np.unique(draw.history[draw.num_prompt :], return_counts=True)
        at = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
        count = torch.from_numpy(counts).to(logits.device, logits.dtype)
        logits[at] -= p.presence_penalty + p.frequency_penalty * count


def _logprobs(logits: Tensor, token: Tensor, draw: Draw) -> TokenLogprob | None:
    if draw.params.logprobs is None:
        return None
    logp = logits.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if draw.params.logprobs:
        values, ids = logp.topk(min(draw.params.logprobs, logp.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logp[token]), top)
