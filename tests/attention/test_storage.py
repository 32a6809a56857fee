"""What attention kinds keep and where: layouts, dummy units, views that follow the pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.attention import full, gated_delta
from freetoken.core.batch import Batch, BatchBuffers, Segment
from freetoken.core.interfaces import Numerics, Pool
from freetoken.core.model_config import AttentionSpec, DeltaSpec
from freetoken.devices.cpu import CpuDevice
from freetoken.kernels.delta_decode import Inputs, Layer
from freetoken.kernels.rope_store import Heads

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=8, rope_theta=1e4)
DELTA = DeltaSpec(num_k_heads=1, num_v_heads=2, k_dim=8, v_dim=8, conv_kernel=4)
DTYPES = [torch.float32, torch.bfloat16]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def pool(unit_bytes: int, units: int = 8) -> Pool:
    made = CpuDevice().pool("p", unit_bytes, units, min_units=1, max_units=units)
    made.view().fill_(0xFF)
    return made


def batch(*segments: Segment, bucket: int = 0) -> Batch:
    last = torch.zeros(8, dtype=torch.int64)
    return BatchBuffers(128, 8, 32, 4, torch.device("cpu"), last).fill(segments, bucket)


def segment(count: int, start: int, pages: list[int], state: int = 1, **more: object) -> Segment:
    return Segment(np.zeros(count, np.int32), start, pages, state, 0, **more)


def attend(storage: full.FullAttention, layer: int, qkv: tuple[Tensor, ...], made: Batch) -> Tensor:
    """Store k and v without norm or rotation, then attend."""
    angles = (torch.ones(16, 4), torch.zeros(16, 4))
    joined = torch.cat([part.flatten(1) for part in qkv], 1)
    return storage.mix(layer, joined, full.Softmax(Heads(4, 2, 8), None, angles), made)


def delta_inputs(count: int, dtype: torch.dtype = torch.float32) -> Inputs:
    shapes = ((DELTA.conv_dim, 0), (16, 1), (2, 2), (2, 3))
    return Inputs(*(rand(count, size, seed=seed).to(dtype) for size, seed in shapes))


WEIGHTS = Layer(
    conv=rand(4, DELTA.conv_dim),
    decay=-rand(2).abs(),
    dt_bias=rand(2, seed=1),
    norm=torch.ones(8),
    eps=1e-6,
    activation="silu",
    heads=(1, 8, 2, 8),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_lie_where_the_layout_says(dtype: torch.dtype) -> None:
    spec = full.state_spec(ATTENTION, 3, 4, dtype)
    storage = full.FullAttention(ATTENTION, 3, Numerics(dtype), pool(spec.unit_bytes))
    assert storage.page_size == 4
    q, k, v = (rand(6, n, 8, seed=i).to(dtype) for i, n in enumerate((4, 2, 2)))
    attend(storage, 1, (q, k, v), batch(segment(6, 0, [5, 2])))
    raw = storage.pool.view().view(dtype).view(8, 3, 2, 4, 2, 8)
    assert torch.equal(raw[5, 1, 0], k[:4]) and torch.equal(raw[5, 1, 1], v[:4])
    assert torch.equal(raw[2, 1, 0, :2], k[4:]) and torch.equal(raw[2, 1, 1, :2], v[4:])
    untouched = [
        raw[page, layer] for page in range(8) for layer in range(3) if (page, layer) not in ((5, 1), (2, 1))
    ]
    assert torch.isnan(torch.stack(untouched)).all()
    assert torch.isnan(raw[2, 1, :, 2:]).all()


def test_dead_rows_write_to_the_dummy_page_only_and_read_zeros() -> None:
    spec = full.state_spec(ATTENTION, 1, 4, torch.float32)
    storage = full.FullAttention(ATTENTION, 1, Numerics(torch.float32), pool(spec.unit_bytes))
    q, k, v = rand(4, 4, 8), rand(4, 2, 8), rand(4, 2, 8, seed=1)
    out = attend(storage, 0, (q, k, v), batch(segment(1, 0, [3]), bucket=4))
    assert torch.allclose(out[0], v[0].repeat_interleave(2, 0)) and not out[1:].any()
    written = (~torch.isnan(storage.pages())).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [0, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_are_aligned_and_start_from_zero_whatever_the_unit_holds(dtype: torch.dtype) -> None:
    spec = gated_delta.state_spec(DELTA, 3, dtype)
    assert spec.unit_bytes % 256 == 0 and spec.resume == "checkpoint"
    storage = gated_delta.GatedDelta(DELTA, 3, Numerics(dtype), pool(spec.unit_bytes))
    conv, delta = storage.states()
    assert conv.shape == (8, 3, DELTA.conv_dim, 3) and delta.shape == (8, 3, 2, 8, 8)
    assert (delta.data_ptr() - storage.pool.view().data_ptr()) % 256 == 0
    inputs = delta_inputs(5, dtype)
    out = storage.attend(1, inputs, WEIGHTS, batch(segment(5, 0, [1], state=6)))
    assert torch.isfinite(out).all()
    assert torch.equal(conv[6, 1], inputs.qkv[2:].t()) and torch.isfinite(delta[6, 1]).all()
    others = [unit for unit in range(8) if unit != 6]
    assert torch.isnan(delta[others]).all() and torch.isnan(delta[6, [0, 2]]).all()


def test_dead_rows_touch_the_dummy_state_only() -> None:
    spec = gated_delta.state_spec(DELTA, 1, torch.float32)
    storage = gated_delta.GatedDelta(DELTA, 1, Numerics(torch.float32), pool(spec.unit_bytes))
    storage.attend(0, delta_inputs(4), WEIGHTS, batch(segment(1, 0, [1], state=3), bucket=4))
    conv, delta = storage.states()
    written = (~torch.isnan(delta)).flatten(1).any(1).nonzero().flatten().tolist()
    assert written == [0, 3] and not torch.isnan(conv[3]).any()


def test_anchors_cut_the_scan_but_not_the_answer() -> None:
    spec = gated_delta.state_spec(DELTA, 1, torch.float32)
    inputs = delta_inputs(100)
    outs, states = [], []
    for anchors in ((), (0, 1, 33, 99, 100, 500)):
        storage = gated_delta.GatedDelta(DELTA, 1, Numerics(torch.float32), pool(spec.unit_bytes))
        outs.append(
            storage.attend(
                0,
                inputs,
                WEIGHTS,
                batch(segment(60, 0, [1] * 15, anchors=anchors), segment(40, 0, [2] * 10, state=2)),
            )
        )
        states.append(storage.states()[1][1:3].clone())
    assert torch.allclose(*outs, atol=1e-5) and torch.allclose(*states, atol=1e-5)
    assert not torch.equal(*outs), "the grid did start anew"


def test_views_follow_the_pool_when_it_is_resized() -> None:
    spec = full.state_spec(ATTENTION, 1, 4, torch.float32)
    storage = full.FullAttention(ATTENTION, 1, Numerics(torch.float32), pool(spec.unit_bytes))
    assert len(storage.pages()) == 8 and storage.pages() is storage.pages()
    storage.pool.resize(3)
    assert len(storage.pages()) == 3


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
@pytest.mark.parametrize("positions", [(2,), (1, 3), (5, 9), (3, 70), (12, 90)])
def test_a_copy_left_on_the_way_is_the_state_of_a_run_that_ends_there(
    positions: tuple[int, ...], exact: bool
) -> None:
    """Also where the convolution still looks back before the segment, and for a run of one token."""
    start, length = 2, max(positions)
    inputs = delta_inputs(length)

    def run(storage: gated_delta.GatedDelta, begin: int, end: int, state: int, **more: object) -> None:
        made = batch(segment(end - begin, begin, [1], state, **more))
        for layer in range(2):
            storage.attend(layer, inputs.rows(slice(begin, end)), WEIGHTS, made)

    def storage() -> gated_delta.GatedDelta:
        spec = gated_delta.state_spec(DELTA, 2, torch.float32)
        made = gated_delta.GatedDelta(DELTA, 2, Numerics(torch.float32, exact), pool(spec.unit_bytes))
        run(made, 0, start - 1, 1)
        run(made, start - 1, start, 1, saves=((start, 7),))
        return made

    whole = storage()
    if length > start:
        saves = tuple((p, 2 + i) for i, p in enumerate(positions) if p > start)
        run(whole, start, length, 1, saves=(*saves, (length + 5, 6)))
    for i, position in enumerate(positions):
        single = storage()
        if position > start:
            run(single, start, position, 1)
            theirs, ours = (s.states() for s in (single, whole))
            for a, b in zip(theirs, ours, strict=True):
                torch.testing.assert_close(b[2 + i], a[1], rtol=1e-5, atol=1e-5)
    conv, delta = whole.states()
    assert torch.isnan(delta[6]).all(), "a copy that lies behind the segment is not its business"
    early = storage()
    for a in early.states():
        assert torch.equal(a[7], a[1])
