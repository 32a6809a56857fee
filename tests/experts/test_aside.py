"""The stream beside the main one, by the rules of a capture: who waits for whom, and never before a fork."""

from __future__ import annotations

import contextlib

import pytest
import torch

from freetoken.experts.aside import Aside
from freetoken.experts.backends._device import DeviceBackend

from . import build
from .test_device import backend, inputs


class Captured:
    """A stream that a capture holds from its start, or from the moment it waits for one that is held."""

    def __init__(self, *, held: bool) -> None:
        self.held, self.waits = held, 0

    def wait_stream(self, other: Captured) -> None:
        assert other.held, "the capture would depend on work that it doesn't hold"
        self.held, self.waits = True, self.waits + 1


def made(tiny: build.Tiny) -> tuple[DeviceBackend, Captured, Captured]:
    main, side = Captured(held=True), Captured(held=False)
    one = backend(tiny, "offload", 7, prefetch=3)
    one._aside = Aside(side, lambda: main, lambda stream: contextlib.nullcontext())
    return one, main, side


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_a_step_can_be_captured_and_ends_with_everything_joined(rows: int) -> None:
    tiny = build.tiny(build.config(layers=3))
    for _ in range(2):  # of a second capture, too, the side stream is no part until it forks
        one, main, side = made(tiny)
        one.begin_step()
        for layer in range(3):
            x, routing = inputs(tiny, rows, layer)
            one.begin(layer, x, routing, None)
            if layer < 2:
                one.look_ahead(layer + 1, lambda layer=layer: inputs(tiny, rows, layer + 1)[1].ids)
            one.finish(layer)
        joined = main.waits
        one._aside.join()
        assert main.waits == joined > 0, "nothing was left to join"
        assert side.waits >= 3 and not one._aside._kept


def test_what_runs_aside_is_joined_once_and_keeps_what_it_reads() -> None:
    main, side = Captured(held=True), Captured(held=False)
    aside = Aside(side, lambda: main, lambda stream: contextlib.nullcontext())
    aside.join()
    assert main.waits == 0
    with aside.launch(after=False):
        aside.keep(torch.zeros(1))
    assert side.waits == 1 and len(aside._kept) == 1, "the first launch forks in any case"
    aside.join()
    aside.join()
    assert main.waits == 1 and not aside._kept
