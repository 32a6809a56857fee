# ruff: noqa: E501 - sentences and small makers read best on one line
"""Top-k routing with its losses: even over the batch, local within a sequence.

Three forces act on the router. Over the whole batch, experts in much use repel tokens, so that none dies. Within a sequence,
experts that the last WINDOW tokens used more than the batch does attract, so that a small cache of experts serves well, as in
large models. That alone makes neighbours alike, too: a third force keeps a token off the experts of the one before, so that
locality is a topic's, not a token's. How strong the two must be is unknown beforehand: LocalityControl steers them by the misses
and the overlap that it sees. All count what the model learns to write, since decoding is where caches matter.
"""

from dataclasses import dataclass

import torch

WINDOW = 64  # tokens over which recent use attracts
START, LEAST, MOST = 0.1, 0.01, 1.0  # of the coefficients that are steered
RECENT = 5  # a choice misses if none of so many previous tokens used that expert in that layer


@dataclass
class Routing:
    """One layer's choices. p, used [B, T, E]: probabilities, and 1 where chosen; z: mean squared log partition."""

    p: torch.Tensor
    used: torch.Tensor
    z: torch.Tensor


@dataclass
class Figures:
    """Per layer [L]: balance (1 if even, the more the worse), pull (probability on experts in unusual use), echo (probability on
    the previous token's experts), z, miss (share of choices that no recent token made), overlap (share made by the previous token
    too); load [L, E]: share of tokens."""

    balance: torch.Tensor
    pull: torch.Tensor
    echo: torch.Tensor
    z: torch.Tensor
    miss: torch.Tensor
    overlap: torch.Tensor
    load: torch.Tensor


def choose(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, Routing]:
    """Weights [B, T, E], renormalised over the top k and zero elsewhere, from float32 logits."""
    p = logits.softmax(-1)
    top, index = p.topk(k, -1)
    weights = torch.zeros_like(p).scatter(-1, index, top / top.sum(-1, keepdim=True))
    return weights, Routing(p, (weights > 0).float().detach(), logits.logsumexp(-1).pow(2).mean())


def _recent(used: torch.Tensor, length: int) -> torch.Tensor:
    """How often each expert was used in the `length` tokens before each token; [L, B, T, E]."""
    total = used.cumsum(2)
    before = torch.cat([torch.zeros_like(total[:, :, :1]), total[:, :, :-1]], 2)
    old = torch.cat([torch.zeros_like(before[:, :, :length]), before[:, :, :-length]], 2)
    return before - old


def measure(p: torch.Tensor, used: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, k: int) -> Figures:
    """p, used [L, B, T, E]; z [L]; weight [B, T]: the tokens that count."""
    share = (weight / weight.sum().clamp(min=1))[None, :, :, None]
    experts = p.shape[-1]
    with torch.no_grad():
        load, everywhere = (used * share).sum((1, 2)), used.mean((1, 2))
        unusual = _recent(used, WINDOW) / WINDOW - load[:, None, None]
        miss = (used * (_recent(used, RECENT) == 0) * share).sum((1, 2, 3)) / k
        overlap = (used[:, :, 1:] * used[:, :, :-1] * share[:, :, 1:]).sum((1, 2, 3)) / k
    here = (p * share).sum((1, 2))
    echo = (p[:, :, 1:] * used[:, :, :-1] * share[:, :, 1:]).sum((1, 2, 3))
    balance = experts / k * ((load * here).sum(-1) + (everywhere * p.mean((1, 2))).sum(-1)) / 2
    return Figures(balance, (p * unusual * share).sum((1, 2, 3)), echo, z, miss, overlap, load)


class LocalityControl:
    """Two coefficients a layer, moved until each layer misses `miss` of its choices and shares `overlap` of them with the token
    before: of the attraction, and of the force against it. With overlap 0 the second force is off.

    They start where gates alone, tuned on recorded states, began to obey, and never fall so low that climbing back takes long."""

    def __init__(self, layers: int, miss: float, overlap: float, device: str) -> None:
        self.miss, self.overlap = miss, overlap
        self.strength = torch.full((layers,), START, device=device)
        self.against = torch.full((layers,), START if overlap else 0.0, device=device)

    def loss(self, f: Figures) -> torch.Tensor:
        """Mean over layers of both forces, weighted; then the coefficients move. Never syncs."""
        loss = (self.against * f.echo - self.strength * f.pull).mean()
        with torch.no_grad():
            self.strength = self._moved(self.strength, f.miss - self.miss)
            if self.overlap:
                self.against = self._moved(self.against, f.overlap - self.overlap)
        return loss

    @staticmethod
    def _moved(strength: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        return (strength * (0.1 * error).exp()).clamp(LEAST, MOST)
