# ruff: noqa: E501 - sentences and small makers read best on one line
"""Muon for matrices, AdamW for the rest, under one learning rate.

Knows nothing about the model but its parameters' names and shapes. Matrices of one shape are orthogonalised together; the
experts' stacked gate and up projections count as separate matrices.
"""

import torch

_ADAM = (
    "embed",
    "norm",
    "gate.weight",
    "shared_expert_gate",
    "conv1d",
    "A_log",
    "dt_bias",
    "in_proj_a",
    "in_proj_b",
)
_STEPS = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def _uses_adam(name: str) -> bool:
    return any(k in name for k in _ADAM) and "up_proj" not in name and "shared_expert.gate_proj" not in name


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Nearest orthogonal matrices of a batch [n, rows, cols], by five steps of a Newton-Schulz iteration."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _STEPS:
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """step(lr) applies the gradients at hand and clears them."""

    def __init__(self, named: dict[str, torch.nn.Parameter], expert_width: int) -> None:
        self.matrices = [p for n, p in named.items() if not _uses_adam(n)]
        self.others = [p for n, p in named.items() if _uses_adam(n)]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in self.others if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in self.others if p.dim() <= 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.97),
            eps=1e-10,
            fused=self.others[0].is_cuda,
        )
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.groups: dict[tuple[int, int], list[tuple[int, tuple[int, int, int]]]] = {}
        for i, p in enumerate(self.matrices):
            stack = (1, *p.shape) if p.dim() == 2 else tuple(p.shape)
            if p.dim() == 3 and p.shape[1] == 2 * expert_width:
                stack = (2 * p.shape[0], p.shape[1] // 2, p.shape[2])
            self.groups.setdefault(stack[1:], []).append((i, stack))

    def step(self, lr: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.others, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._muon(lr)
        for p in [*self.matrices, *self.others]:
            p.grad = None

    @torch.no_grad()
    def _muon(self, lr: float, decay: float = 0.1, beta: float = 0.95) -> None:
        gradients = [p.grad for p in self.matrices]
        torch._foreach_lerp_(self.momentum, gradients, 1 - beta)
        updates = torch._foreach_lerp(gradients, self.momentum, beta)
        for (rows, cols), members in self.groups.items():
            g = orthogonal(torch.cat([updates[i].reshape(stack) for i, stack in members])) * (
                0.2 * max(rows, cols) ** 0.5
            )
            at = 0
            for i, stack in members:
                p = self.matrices[i]
                p.mul_(1 - lr * decay).sub_(g[at : at + stack[0]].reshape(p.shape), alpha=lr)
                at += stack[0]
