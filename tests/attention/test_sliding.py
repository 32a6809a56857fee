"""Rings of keys and values: any cut of a sequence, any company, any copy gives what pages give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freetoken.attention import full, sliding
from freetoken.core.batch import BatchBuffers, Segment
from freetoken.core.interfaces import Numerics
from freetoken.core.model_config import AttentionSpec
from freetoken.devices.cpu import CpuDevice
from freetoken.kernels.rope_store import Heads

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=8, rope_theta=1e4)
HEADS = Heads(4, 2, 8)
LENGTH = 90
ANGLES = torch.rand(LENGTH, 4, generator=torch.Generator().manual_seed(1)) * 6
SINKS = torch.randn(4, generator=torch.Generator().manual_seed(2))
QKV = torch.randn(LENGTH, 64, generator=torch.Generator().manual_seed(3))


def kind(window: int) -> full.Softmax:
    return full.Softmax(HEADS, None, (ANGLES.cos(), ANGLES.sin()), window, SINKS)


class Rings:
    """A storage of two layers with poisoned states, and sequences that go through it."""

    def __init__(self, window: int, *, exact: bool = True, states: int = 6) -> None:
        spec = sliding.state_spec(SPEC, 2, window, torch.float32)
        self.pool = CpuDevice().pool("s", spec.unit_bytes, states, min_units=1, max_units=states)
        self.pool.view().fill_(0xFF)
        numerics = Numerics(torch.float32, exact=exact)
        self.storage = sliding.SlidingAttention(SPEC, 2, window, numerics, self.pool)
        self.kind = kind(window)

    def step(
        self, *work: tuple[int, int, int], bucket: int = 0, saves: tuple[tuple[int, int], ...] = ()
    ) -> Tensor:
        """Layer 1 over (state, start, stop) of the one sequence; saves belong to the first."""
        segments = [
            Segment(np.zeros(b - a, np.int32), a, [1] * 23, unit, 0, saves=() if i else saves)
            for i, (unit, a, b) in enumerate(work)
        ]
        last = torch.zeros(8, dtype=torch.int64)
        batch = BatchBuffers(256, 8, 32, 4, torch.device("cpu"), last).fill(segments, bucket)
        rows = [QKV[a:b] for _, a, b in work]
        rows.append(torch.zeros(batch.num_rows - sum(map(len, rows)), 64))
        return self.storage.mix(1, torch.cat(rows), self.kind, batch)


def paged(window: int) -> Tensor:
    """The whole sequence at once through pages: the oracle."""
    spec = full.state_spec(SPEC, 1, 16, torch.float32)
    pool = CpuDevice().pool("p", spec.unit_bytes, 8, min_units=1, max_units=8)
    storage = full.FullAttention(SPEC, 1, Numerics(torch.float32, exact=True), pool)
    segment = Segment(np.zeros(LENGTH, np.int32), 0, [1, 2, 3, 4, 5, 6], 0, 0)
    last = torch.zeros(8, dtype=torch.int64)
    batch = BatchBuffers(256, 8, 32, 16, torch.device("cpu"), last).fill([segment])
    return storage.mix(0, QKV, kind(window), batch)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 40, 128])
def test_any_cut_gives_what_pages_give(window: int) -> None:
    want = paged(window)

    @settings(max_examples=8, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.booleans())
    def check(sizes: list[int], singly: bool) -> None:
        rings, at, out = Rings(window), 0, []
        for size in [*sizes, *([1] * 20 if singly else []), LENGTH]:
            stop = min(at + size, LENGTH)
            if stop > at:
                out.append(rings.step((2, at, stop)))
            at = stop
        assert torch.equal(torch.cat(out), want)

    check()


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_decoding_in_place_is_the_same_within_rounding(window: int) -> None:
    want, rings = paged(window), Rings(window, exact=False)
    rings.step((1, 0, 50), (2, 0, 20))
    for i in range(30):
        out = rings.step((1, 50 + i, 51 + i), (2, 20 + i, 21 + i), bucket=4)
        assert torch.allclose(out[0], want[50 + i], atol=1e-5)
        assert torch.allclose(out[1], want[20 + i], atol=1e-5)
        assert not out[2:].any()
    mixed = rings.step((2, 50, 51), (1, 80, 90))
    assert torch.allclose(mixed, torch.cat([want[50:51], want[80:90]]), atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("window", "at"), [(16, 1), (16, 33), (17, 48), (40, 47), (40, 64), (5, 63), (128, 20)]
)
def test_a_copy_made_on_the_way_resumes_where_it_was_made(window: int, at: int, exact: bool) -> None:
    want, rings = paged(window), Rings(window, exact=exact)
    rings.step((1, 0, 64), saves=((at, 3),))
    out = rings.step((3, at, at + 20))
    assert (
        torch.equal(out, want[at : at + 20]) if exact else torch.allclose(out, want[at : at + 20], atol=1e-5)
    )
    rings.step((1, 64, 65), saves=((65, 4), (70, 5)))
    out = rings.step((4, 65, LENGTH))
    assert torch.equal(out, want[65:]) if exact else torch.allclose(out, want[65:], atol=1e-5)
    unit = rings.pool.view().view(torch.float32)[5]
    assert torch.isnan(unit).all(), "a position that was not reached is not saved"


def test_dead_rows_and_other_layers_touch_nothing() -> None:
    rings = Rings(20, exact=False)
    rings.step((2, 0, 40))
    rings.step((2, 40, 41), bucket=4)
    pages = rings.storage.pages().unflatten(0, (6, -1))
    written = (~torch.isnan(pages)).flatten(3).any(3)
    assert written.any(1)[:, 1].tolist() == [True, False, True, False, False, False]
    assert not written[:, :, 0].any(), "layer 0"
