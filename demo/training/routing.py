"""Top-k routing with its losses: even over the batch, local within a sequence.

Two forces act on the router. Over the whole batch, experts in much use repel tokens, so that none dies. Within a sequence,
experts that the last WINDOW tokens used more than the batch did attract, so that a small cache of experts serves well, as in
large models. How strong the attraction must be is unknown beforehand: LocalityControl steers it by the misses that it sees.
"""

from dataclasses import dataclass

import torch

WINDOW = 64  # tokens over which recent use attracts
RECENT = 5  # a choice misses if none of so many previous tokens used that expert in that layer


@dataclass
class Routing:
    """weights [B, T, E]: renormalised, zero but for the top k; load [E]: share of tokens; the others are scalars.

    balance   1 if even, the more the worse        pull   probability on experts in unusual use
    z         mean squared log partition           miss   share of choices that no recent token made
    overlap   share of choices made by the previous token too
    """

    weights: torch.Tensor
    load: torch.Tensor
    balance: torch.Tensor
    pull: torch.Tensor
    z: torch.Tensor
    miss: torch.Tensor
    overlap: torch.Tensor


def _recent(used: torch.Tensor, length: int) -> torch.Tensor:
    """How often each expert was used in the `length` tokens before each token; [B, T, E]."""
    total = used.cumsum(1)
    before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)
    old = torch.cat([torch.zeros_like(before[:, :length]), before[:, :-length]], 1)
    return before - old


def route(logits: torch.Tensor, k: int) -> Routing:
    """logits float32 [B, T, E]."""
    p = logits.softmax(-1)
    top, index = p.topk(k, -1)
    weights = torch.zeros_like(p).scatter(-1, index, top / top.sum(-1, keepdim=True))
    with torch.no_grad():
        used = torch.zeros_like(p).scatter(-1, index, torch.ones_like(top))
        load = used.mean((0, 1))
        unusual = _recent(used, WINDOW) / WINDOW - load
        miss = (used * (_recent(used, RECENT) == 0)).sum(-1).mean() / k
        overlap = (used[:, 1:] * used[:, :-1]).sum(-1).mean() / k
    balance = p.shape[-1] / k * (load * p.mean((0, 1))).sum()
    pull = (p * unusual).sum(-1).mean()
    return Routing(weights, load, balance, pull, logits.logsumexp(-1).pow(2).mean(), miss, overlap)


class LocalityControl:
    """One coefficient a layer for the attraction, moved so that each layer misses `target` of its choices."""

    def __init__(self, layers: int, target: float, device: str, start: float = 0.02, low: float = 1e-3, high: float = 0.5) -> None:
        self.target, self.low, self.high = target, low, high
        self.strength = torch.full((layers,), start, device=device)

    def loss(self, routings: list[Routing]) -> torch.Tensor:
        """Mean attraction over layers, weighted; then the coefficients move. Never syncs."""
        pull = torch.stack([r.pull for r in routings])
        miss = torch.stack([r.miss for r in routings])
        loss = -(self.strength * pull).mean()
        with torch.no_grad():
            self.strength = (self.strength * (0.05 * (miss - self.target)).exp()).clamp(self.low, self.high)
        return loss
