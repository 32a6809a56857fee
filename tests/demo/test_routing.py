"""Routing losses of the demo model: what they count, and that the controller steers what it promises."""

import pytest
import torch

from demo.training.routing import RECENT, LocalityControl, choose, measure

LAYERS, ROWS, LENGTH, EXPERTS, K = 1, 2, 128, 16, 2


def figures(logits: torch.Tensor):
    """logits [L, B, T, E]; every token counts."""
    routings = [choose(layer, K)[1] for layer in logits]
    p, used, z = (torch.stack([getattr(r, name) for r in routings]) for name in ("p", "used", "z"))
    return measure(p, used, z, torch.ones(logits.shape[1:3]), K)


def one_hot(choices: list[list[int]]) -> torch.Tensor:
    logits = torch.zeros(1, 1, len(choices), EXPERTS)
    for t, chosen in enumerate(choices):
        logits[0, 0, t, chosen] = 9.0
    return logits


def test_overlap_is_what_the_previous_token_chose_too_and_a_miss_what_no_recent_one_did():
    f = figures(one_hot([[0, 1], [0, 2], [3, 4], [0, 1]]))
    assert f.overlap.item() == pytest.approx(1 / 8)
    assert f.miss.item() == pytest.approx(5 / 8)
    filler = [[2 + 2 * i % 12, 3 + 2 * i % 12] for i in range(RECENT)]
    far = figures(one_hot([[0, 1], *filler, [0, 1]]))
    assert far.miss.item() == pytest.approx(1.0), "a choice is forgotten after RECENT tokens"


def test_the_echo_grows_with_what_a_token_likes_of_the_previous_ones_experts():
    alike, apart = (figures(one_hot([[0, 1], second])) for second in ([0, 1], [2, 3]))
    assert alike.echo.item() > 0.4 > 0.05 > apart.echo.item()


def settled(miss: float, overlap: float) -> tuple[float, float]:
    """(miss, overlap) after steering free routers over a signal that drifts, as a text does."""
    draw = torch.Generator().manual_seed(3)
    steps = torch.randn(ROWS, LENGTH, 24, generator=draw)
    slow = torch.stack([steps[:, max(0, t - 24) : t + 1].mean(1) for t in range(LENGTH)], 1) * 4
    x = torch.cat([steps, slow], -1)
    weight = (torch.randn(LAYERS, 48, EXPERTS, generator=draw) * 0.15).requires_grad_()
    optimiser, control = torch.optim.Adam([weight], lr=0.03), LocalityControl(LAYERS, miss, overlap, "cpu")
    control.strength += 0.3
    control.against += 0.3 if overlap else 0.0
    for _ in range(160):
        f = figures(torch.einsum("bth,lhe->lbte", x, weight))
        loss = control.loss(f) + 0.02 * f.balance.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return f.miss.mean().item(), f.overlap.mean().item()


def test_the_force_against_echoes_keeps_neighbours_apart():
    (_, free), (_, steered) = settled(0.25, 0.0), settled(0.25, 0.35)
    assert steered < free - 0.1


def test_forces_grow_while_their_aim_is_missed_and_one_without_an_aim_stays_off():
    f = figures(one_hot([[0, 1], [0, 1], [0, 1], [2, 3]]))
    both, one = LocalityControl(1, 0.1, 0.2, "cpu"), LocalityControl(1, 0.9, 0.0, "cpu")
    before = both.strength.item(), both.against.item(), one.strength.item()
    for control in (both, one):
        for _ in range(3):
            control.loss(f)
    assert both.strength.item() > before[0] and both.against.item() > before[1]
    assert one.strength.item() < before[2] and one.against.item() == 0.0
