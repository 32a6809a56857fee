"""What is brought before it is asked for changes times, never answers, and stops where guesses are poor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.experts.prefetch import PAUSE_STEPS, WATCHED_TILES, Prefetch, tiles_of_idle_time

from . import build
from .test_device import backend, inputs


def test_idle_time_of_a_link_is_counted_in_whole_tiles() -> None:
    assert tiles_of_idle_time(46.8e9, 393_216, 32) == 5
    assert tiles_of_idle_time(46.8e9, 4 << 20, 32) == 0
    assert tiles_of_idle_time(46.8e9, 1024, 32) == 32


def test_poor_guesses_end_it_for_a_while() -> None:
    made = Prefetch(5)
    assert made.budget(16, 400, 10) == 5, "too few to judge"
    assert made.budget(32, WATCHED_TILES, 60) == 0
    assert made.budget(33, WATCHED_TILES, 60) == 0
    later = 32 + PAUSE_STEPS
    assert made.budget(later, WATCHED_TILES, 60) == 5
    assert made.budget(later + 16, 2 * WATCHED_TILES, 60 + WATCHED_TILES // 2) == 5, "half of them were right"


@pytest.mark.parametrize(("rows", "wrong"), [(1, 0), (1, 1), (3, 0), (17, 0)])
def test_guesses_never_change_a_bit(rows: int, wrong: int) -> None:
    tiny = build.tiny(build.config(layers=4))

    def run(name: str, slots: int, prefetch: int) -> tuple[list[torch.Tensor], object]:
        made = backend(tiny, name, slots, prefetch=prefetch)
        outs = []
        for step in range(8):
            made.begin_step()
            for layer in range(tiny.bank.num_layers):
                x, routing = inputs(tiny, rows, 10 * step + layer)
                made.begin(layer, x, routing, None)
                if layer + 1 < tiny.bank.num_layers:
                    guess = inputs(tiny, rows, 10 * step + layer + 1 + 100 * wrong)[1].ids
                    made.look_ahead(layer + 1, lambda guess=guess: guess)
                outs.append(made.finish(layer))
            made.end_step(0.0)
        made.table.count(made.stats)
        return outs, made

    whole, _ = run("fused", 0, 0)
    for prefetch in (0, 2, 32):
        outs, made = run("offload", 7, prefetch)
        for mine, theirs in zip(outs, whole, strict=True):
            assert torch.equal(mine, theirs)
        table, stats = made.table.table, made.stats
        held = table.expert_of >= 0
        assert torch.equal(table.slot_of[table.expert_of[held].long()], held.nonzero().flatten().int())
        assert bool(stats.ahead_tiles) == (prefetch > 0 and rows <= 16)
        if stats.ahead_tiles and not wrong:
            assert stats.ahead_right == stats.ahead_judged > 0
            assert stats.missing_tiles < run("offload", 7, 0)[1].stats.missing_tiles


def test_what_was_brought_is_what_the_host_holds() -> None:
    tiny = build.tiny(build.config(layers=4))
    made = backend(tiny, "offload", 9, prefetch=5)
    rng = np.random.default_rng(0)
    for step in range(30):
        made.begin_step()
        for layer in range(tiny.bank.num_layers):
            x, routing = inputs(tiny, 2, int(rng.integers(1 << 30)))
            made.begin(layer, x, routing, None)
            if layer + 1 < tiny.bank.num_layers:
                seed = int(rng.integers(1 << 30))
                made.look_ahead(layer + 1, lambda seed=seed: inputs(tiny, 2, seed)[1].ids)
            made.finish(layer)
        table = made.table.table
        for slot in (table.expert_of >= 0).nonzero().flatten().tolist():
            expert = int(table.expert_of[slot])
            layer, local = divmod(expert, tiny.bank.num_experts)
            place = made.table.places[layer]
            end = place.tiles_offset + int(table.tiles_in[slot]) * place.tile_bytes
            start = 0 if int(table.tiles_in[slot]) else end
            assert torch.equal(place.slots[slot, start:end], place.records[local, start:end]), (step, slot)
