"""Logits into tokens, row by row. Owns the device buffer of last tokens; knows no request.

A draw depends on (seed, position) and the row's own logits only, so batch composition, chunking and
preemption never change it. Order: bias, bans, penalties, mask; then, by `kernels.sample`, temperature, top-k,
top-p, min-p, draw. Reported log probabilities are the model's own, before any of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.core.request import SamplingParams, TokenLogprob
from freetoken.engine.slips import Sampled, Slips
from freetoken.kernels.sample import Choice, sample

_MASK = (1 << 64) - 1
NEVER = -3e38
WAYS = (Choice(0, 0), Choice(0, 0, temperature=1.0), Choice(0, 0, temperature=1.0, top_p=0.5))
"""Of drawing, that have kernels of their own."""


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
        self._slips = Slips(max_rows, torch.cuda.Event if device.type == "cuda" else None)

    def sample(self, logits: Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        """Draw one token for each of `rows` (default: all) of `logits` float32 [R, V]. Never waits for the
        device unless log probabilities are wanted."""
        rows = range(len(draws)) if rows is None else rows
        choices = [choice_of(logits, row, draw) for row, draw in zip(rows, draws, strict=True)]
        with self._slips.taken(len(draws)) as piece:
            slip = piece.slip(len(draws))
            sample(logits, choices, self.last_tokens, slip)
        reported = tuple(self._reported(logits, *one) for one in zip(rows, draws, strict=True))
        return piece.sampled(slip, reported)

    def rehearse(self, logits: Tensor) -> None:
        """Sample rows that nobody asked for, in each of the ways that have kernels of their own."""
        last, rows = torch.zeros_like(self.last_tokens), range(min(len(logits), len(self.last_tokens)))
        for how in WAYS if rows else ():
            choices = [how._replace(source=row, row=row) for row in rows]
            with self._slips.taken(len(rows)) as piece:
                sample(logits, choices, last, piece.slip(len(rows)))

    def _reported(self, logits: Tensor, row: int, draw: Draw) -> TokenLogprob | None:
        wanted = draw.params.logprobs
        return None if wanted is None else _logprobs(logits[row], self.last_tokens[draw.row], wanted)


def choice_of(logits: Tensor, row: int, draw: Draw) -> Choice:
    """How a row of the logits is drawn; what has to be changed in it is changed in a copy."""
    p = draw.params
    if draw.forced_id >= 0:
        return Choice(row, draw.row, forced=draw.forced_id)
    adjusted = adjust(logits[row], draw) if _is_adjusted(draw) else None
    if p.temperature == 0:
        return Choice(row, draw.row, adjusted=adjusted)
    u = uniform(p.seed, draw.position)
    return Choice(row, draw.row, u, p.temperature, p.top_k, p.top_p, p.min_p, adjusted=adjusted)


def _is_adjusted(draw: Draw) -> bool:
    p = draw.params
    penalised = draw.history is not None and _penalised(p)
    return bool(p.logit_bias or draw.banned or draw.mask is not None or penalised)


def _penalised(p: SamplingParams) -> bool:
    return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


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


def _logprobs(logits: Tensor, token: Tensor, wanted: int) -> TokenLogprob:
    logp = logits.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if wanted:
        values, ids = logp.topk(min(wanted, logp.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(float(logp[token]), top)
