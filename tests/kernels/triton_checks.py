"""Every Triton maker against the reference of its operation, over shapes and edges.

Not collected by itself: test_triton.py runs it interpreted (small shapes, float16: the interpreter's
bfloat16 is wrong) and, on a machine with a card, compiled, in both 16-bit types and at real sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from freetoken.kernels._triton import INTERPRETED, card
from freetoken.kernels.attention import reference as attention_reference
from freetoken.kernels.attention import triton as attention
from freetoken.kernels.causal_conv import reference as conv_reference
from freetoken.kernels.causal_conv import triton as causal_conv
from freetoken.kernels.delta_decode import Inputs, Layer
from freetoken.kernels.delta_decode import reference as delta_reference
from freetoken.kernels.delta_decode import triton as delta_decode
from freetoken.kernels.gated_delta import reference as gated_reference
from freetoken.kernels.gated_delta import triton as gated_delta
from freetoken.kernels.gating import reference as gating_reference
from freetoken.kernels.gating import triton as gating
from freetoken.kernels.linear import reference as linear_reference
from freetoken.kernels.linear import triton as linear
from freetoken.kernels.norm_linear import triton as norm_linear
from freetoken.kernels.rms_norm import reference as rms_reference
from freetoken.kernels.rms_norm import triton as rms_norm
from freetoken.kernels.rope import reference as rope_reference
from freetoken.kernels.rope import triton as rope
from freetoken.kernels.rope_store import Heads, Place
from freetoken.kernels.rope_store import reference as store_reference
from freetoken.kernels.rope_store import triton as rope_store
from freetoken.kernels.router import reference as router_reference
from freetoken.kernels.router import triton as router
from freetoken.layers.linear import Linear

# numpy's, from the interpreter's loops with run-time bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
PLACE = "cpu" if INTERPRETED else "cuda"
WIDE = [] if INTERPRETED else [torch.float32]
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
ROUND = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(PLACE, dtype)


def close(ours: Tensor, want: Tensor, bound: float) -> None:
    assert ours.shape == want.shape and ours.dtype == want.dtype
    if want.numel():
        gap = float((ours.double() - want.double()).abs().max())
        assert gap <= bound * (1 + float(want.double().abs().max())), gap


def steady(call: Callable[[], Tensor]) -> Tensor:
    """What `call` returns; on a card it must return the same bits again and again."""
    first = call()
    for _ in range(0 if INTERPRETED else 30):
        assert torch.equal(call(), first)
    return first


def big(*sizes: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Sizes for a card only."""
    return [] if INTERPRETED else list(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (2, 3, 40), *big((300, 32, 128), (4, 2880), (3, 16384))])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = rand(*shape, dtype=dtype), rand(shape[-1])
    close(rms_norm.rms_norm(x, weight, 1e-6), rms_reference.rms_norm(x, weight, 1e-6), ROUND[dtype])
    wide = rand(*shape[:-1], shape[-1] + 8, dtype=dtype)[..., 3 : 3 + shape[-1]]
    close(rms_norm.rms_norm(wide, weight, 1e-6), rms_reference.rms_norm(wide, weight, 1e-6), ROUND[dtype])


LINEARS = [(1, 36, 1500), (2, 300, 256), (16, 257, 264)]
LINEARS += big((1, 5120, 2048), (1, 151936, 2048), (1, 2048, 4096), (3, 5120, 2880), (16, 2048, 4096))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), LINEARS)
def test_linear_with_bias_residual_and_norm(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, k, dtype=dtype), rand(n, k, dtype=dtype) * k**-0.5
    bias, residual, norm = rand(n, dtype=dtype), rand(rows, n, dtype=dtype), rand(k).abs()
    bound = 2 * ROUND[dtype]
    close(linear.linear(x, weight, None), linear_reference.linear(x, weight, None), bound)
    want = residual + linear_reference.linear(x, weight, bias)
    close(linear.linear_add(x, weight, bias, residual), want, bound)
    normed = linear_reference.linear(rms_reference.rms_norm(x, norm, 1e-5), weight, bias)
    close(norm_linear.norm_linear(x, norm, 1e-5, weight, bias), normed, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_leaves_other_products_to_torch(dtype: torch.dtype) -> None:
    weight = rand(300, 256, dtype=dtype)
    for x in (rand(17, 256, dtype=dtype), rand(0, 256, dtype=dtype), rand(2, 3, 256, dtype=dtype)):
        close(linear.linear(x, weight, None), linear_reference.linear(x, weight, None), 2 * ROUND[dtype])
    one = rand(2, 256)
    close(linear.linear(one, weight.float(), None), linear_reference.linear(one, weight.float(), None), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 200])
def test_a_layer_of_uneven_outputs(rows: int, dtype: torch.dtype) -> None:
    x, weight = rand(rows, 64, dtype=dtype), rand(1025, 64, dtype=dtype) / 8
    layer = Linear(weight)
    assert layer.shape == weight.shape == layer.weight.shape
    close(layer(x), linear_reference.linear(x, weight, None), 2 * ROUND[dtype])


def paged(num: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> Tensor:
    """One layer's strided view of a pool of pages."""
    return rand(num, 3, 2, page, kv_heads, dim, dtype=dtype)[:, 1]


DECODES = [  # heads, key heads, dim, page, window, sinks
    (8, 2, 32, 8, None, False),
    (6, 2, 24, 16, 20, True),
    (4, 4, 16, 4, None, True),
    *big(
        (32, 4, 128, 16, None, False),
        (16, 2, 256, 64, None, True),
        (64, 8, 64, 16, 128, True),
        (5, 1, 80, 128, 1, False),
        (32, 4, 128, 1, None, False),
    ),
]


@pytest.mark.parametrize(
    ("case", "dtype"), [(DECODES[1], torch.float32), *product(DECODES, [*DTYPES, *WIDE])]
)
def test_decode_attention(case: tuple[int, int, int, int, int | None, bool], dtype: torch.dtype) -> None:
    heads, kv, dim, page, window, with_sinks = case
    lengths = [1, page, 0, 3 * page + 1, 150] if INTERPRETED else [1, page, 0, 3 * page + 1, 150, 4000, 1025]
    width = -(-max(lengths) // page) + 2
    used = sum(-(-n // page) for n in lengths)
    pages, q = paged(used + 1, kv, dim, page, dtype), rand(len(lengths), heads, dim, dtype=dtype)
    table = torch.zeros(len(lengths), width + 3, dtype=torch.int64)
    order = torch.randperm(used, generator=torch.Generator().manual_seed(1)) + 1
    pages[0] = float("nan")
    for i, length in enumerate(lengths):
        own, order = order[: -(-length // page)], order[-(-length // page) :]
        table[i, : len(own)] = own
        if length % page:
            pages[own[-1], :, length % page :] = float("nan")
    table = table.to(PLACE)[:, :width]
    context = torch.tensor(lengths, dtype=torch.int32, device=PLACE)
    sinks = rand(heads) if with_sinks else None
    ours = attention.attend_decode(q, pages, table, context, 0.3, window, sinks)
    want = attention_reference.attend_decode(q, pages, table, context, 0.3, window, sinks)
    close(ours, want, 4 * ROUND.get(dtype, 1e-5))
    if not INTERPRETED:
        assert torch.equal(ours, attention.attend_decode(q, pages, table, context, 0.3, window, sinks))


PREFILLS = [  # new tokens, length, heads, key heads, dim, page, window, sinks
    (20, 20, 4, 2, 16, 8, None, False),
    (5, 70, 2, 1, 24, 64, None, True),
    (70, 90, 2, 1, 16, 16, 11, True),
    (7, 150, 4, 2, 16, 8, None, True),
    (20, 300, 4, 1, 16, 32, 30, False),
    *big(
        (16, 5000, 32, 4, 128, 16, None, False),
        (8, 300, 16, 2, 256, 64, 100, True),
        (1, 4097, 16, 2, 128, 64, None, False),
        (1000, 1000, 32, 4, 128, 16, None, False),
        (129, 5000, 32, 4, 128, 128, None, True),
        (700, 2000, 16, 2, 256, 64, None, False),
        (513, 900, 64, 8, 64, 16, 128, True),
        (64, 64, 5, 1, 80, 1, None, False),
    ),
]


@pytest.mark.parametrize(
    ("case", "dtype"), [(PREFILLS[2], torch.float32), *product(PREFILLS, [*DTYPES, *WIDE])]
)
def test_prefill_attention(case: tuple[int, ...], dtype: torch.dtype) -> None:
    n, length, heads, kv, dim, page, window, with_sinks = case
    used = -(-length // page)
    pages, q = paged(used + 2, kv, dim, page, dtype), rand(n, heads, dim, dtype=dtype)
    table = (torch.randperm(used, generator=torch.Generator().manual_seed(1)) + 1).to(PLACE)
    if length % page:
        pages[table[-1], :, length % page :] = float("nan")
    sinks = rand(heads) if with_sinks else None
    ours = steady(lambda: attention.attend(q, pages, table, length, 0.3, window, sinks))
    pages = pages.nan_to_num()
    want = attention_reference.attend(q, pages, table, length, 0.3, window, sinks)
    close(ours, want, 4 * ROUND.get(dtype, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "turning"), [(3, 24, 12), (4, 16, 4), *big((32, 128, 64), (16, 256, 32))]
)
def test_rotation(heads: int, dim: int, turning: int, dtype: torch.dtype) -> None:
    x, angle = rand(7, heads, dim + 8, dtype=dtype)[..., :dim], rand(7, turning)
    ours = rope.rotate(x, angle.cos(), angle.sin())
    close(ours, rope_reference.rotate(x, angle.cos(), angle.sin()), ROUND[dtype])
    assert torch.equal(ours[..., 2 * turning :], x[..., 2 * turning :])


STORES = [
    (Heads(3, 1, 16), 8, 4, True),
    (Heads(4, 2, 24, gated=True), 4, 8, True),
    (Heads(2, 2, 16), 6, 1, False),
]
STORES += big((Heads(32, 4, 128), 64, 16, True), (Heads(16, 2, 256, gated=True), 32, 64, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 10, *big(600)])
@pytest.mark.parametrize(("heads", "turning", "page", "normed"), STORES)
def test_rope_store(
    heads: Heads, turning: int, page: int, normed: bool, rows: int, dtype: torch.dtype
) -> None:
    width = heads.num * heads.dim * (1 + heads.gated) + 2 * heads.num_kv * heads.dim
    qkv = rand(rows, width + 5, dtype=dtype)[:, :width]
    norms = (rand(heads.dim).abs(), rand(heads.dim, seed=1).abs(), 1e-6) if normed else None
    angle = rand(2 * rows + 3, turning)
    seq_of = (torch.arange(rows) >= rows // 2).long()
    positions = torch.arange(rows) - seq_of * (rows // 2) + 3
    live = torch.arange(rows) != 4
    positions[~live] = 1 << 20
    table = torch.arange(2 * (rows + 5)).view(2, -1) + 1
    place = Place(*(t.to(PLACE) for t in (positions.where(live, 0), seq_of, live, table)))
    blank = paged(2 * (rows + 5) + 1, heads.num_kv, heads.dim, page, dtype)
    ours, want = blank.clone(), blank.clone()
    angles = (angle.cos(), angle.sin())
    q = rope_store.rope_store(qkv, heads, norms, angles, ours, place)
    close(
        q[place.live],
        store_reference.rope_store(qkv, heads, norms, angles, want, place)[place.live],
        2 * ROUND[dtype],
    )
    close(ours[1:], want[1:], 2 * ROUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "top_k"),
    [
        (3, 9, 40, 2),
        (20, 16, 24, 16),
        *big((1, 128, 2048, 8), (5, 256, 2048, 8), (300, 128, 2048, 8), (2, 32, 2880, 4)),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_router(
    rows: int, experts: int, hidden: int, top_k: int, normalise: bool, dtype: torch.dtype
) -> None:
    h, norm, weight = rand(rows, hidden, dtype=dtype), rand(hidden).abs(), rand(experts, hidden)
    weight[1] = weight[experts // 2]  # equal experts: the lower one comes first
    live = torch.arange(rows, device=PLACE) != 1
    bias = rand(experts, seed=3) if top_k % 2 == 0 else None
    if bias is not None:
        bias[1] = bias[experts // 2]
    x, ids, weights = router.route(h, norm, 1e-6, weight, top_k, normalise, live, bias)
    want = router_reference.route(h, norm, 1e-6, weight, top_k, normalise, live, bias)
    close(x, want[0], ROUND[dtype])
    same = (ids == want[1]).all(1)
    assert same.float().mean() >= (1.0 if rows < 100 else 0.98), "near ties apart, the same experts"
    assert ids.dtype == torch.int32 and (ids[live].diff(dim=1) > 0).all()
    close(weights[same], want[2][same], 0.02)
    assert (ids[~live] == -1).all() and (weights[~live] == 0).all()


def test_a_biased_router_is_two_launches_as_any() -> None:
    h, norm, weight, bias = rand(2, 40), rand(40), rand(9, 40), rand(9)
    to = (torch.empty(2, 9), torch.empty(2, 40))
    live, ids = torch.ones(2, dtype=torch.bool), torch.empty(2, 3, dtype=torch.int32)
    launches = [
        *router.plan_logits(h, norm, 1e-6, (weight, bias), (to[1], to[0]), card(h.device)),
        *router.plan_choice(to[0], live, (ids, to[0]), True, card(h.device)),
    ]
    assert len(launches) == 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nan_still_names_experts() -> None:
    h = torch.full((2, 40), float("nan"), dtype=torch.float16, device=PLACE)
    live = torch.ones(2, dtype=torch.bool, device=PLACE)
    _, ids, _ = router.route(h, rand(40), 1e-6, rand(9, 40), 3, True, live)
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seqs", "n", "channels", "taps"), [(2, 1, 5, 4), (1, 2, 40, 4), (1, 37, 130, 3), (2, 3, 4, 1)]
)
def test_convolution(seqs: int, n: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    x, weight = rand(seqs, n, channels + 3, dtype=dtype)[..., :channels], rand(taps, channels)
    ours = rand(seqs, 2, channels, taps - 1, dtype=dtype)[:, 1]
    want = ours.clone()
    out = causal_conv.causal_conv(x, ours, weight, "silu")
    close(out, conv_reference.causal_conv(x, want, weight, "silu"), 1e-5)
    assert torch.equal(ours, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 16, 4, 16), (1, 12, 3, 20), *big((16, 128, 32, 128), (8, 64, 8, 128))])
def test_delta_decode(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    k_heads, k_dim, v_heads, v_dim = heads
    channels, rows = 2 * k_heads * k_dim + v_heads * v_dim, 4
    sizes = [channels, v_heads * v_dim, v_heads, v_heads]
    inputs = Inputs(*rand(rows, sum(sizes), dtype=dtype).split(sizes, 1))
    decay, bias = -rand(v_heads).abs(), rand(v_heads, seed=1)
    layer = Layer(rand(4, channels), decay, bias, rand(v_dim).abs(), 1e-6, "silu", heads)
    conv, delta = rand(6, 2, channels, 3, dtype=dtype)[:, 1], rand(6, 2, v_heads, k_dim, v_dim)[:, 1]
    which = torch.tensor([3, 1, 5, 0], device=PLACE), torch.tensor([False, True, False, True], device=PLACE)
    other = conv.clone(), delta.clone()
    ours = delta_decode.delta_decode(inputs, layer, conv, delta, *which)
    want = delta_reference.delta_decode(inputs, layer, *other, *which)
    close(ours[:3], want[:3], 2 * ROUND[dtype])
    close(delta[1:], other[1][1:], 1e-4)
    assert torch.equal(conv[1:], other[0][1:])
    for a, b in zip(delta_decode.gates(inputs, layer), delta_reference.gates(inputs, layer), strict=True):
        close(a, b, 1e-5)
    out = rand(rows, v_heads, v_dim)
    close(
        delta_decode.gated_norm(out, inputs, layer),
        delta_reference.gated_norm(out, inputs, layer),
        2 * ROUND[dtype],
    )


@pytest.mark.parametrize(
    ("length", "heads", "cuts"),
    [
        (130, (1, 12, 2, 20), (1, 70, 129)),
        (64, (2, 16, 2, 16), ()),
        *big((9000, (16, 128, 32, 128), (17, 4000))),
    ],
)
def test_chunked_delta_rule(length: int, heads: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    k_heads, k_dim, v_heads, v_dim = heads
    both = rand(length, 2, k_heads, k_dim + 1)
    # Keys that hardly differ and hardly fade: where powers of the system would lose all digits.
    k = both[:, 0, :, :k_dim] * 0.05 + 1.0 if length == 130 else both[:, 0, :, :k_dim]
    q, v, g = both[:, 1, :, :k_dim], rand(length, v_heads, v_dim, seed=1), rand(length, v_heads, seed=2)
    inputs = (q, k, v, -g.abs() * 0.01, torch.sigmoid(rand(length, v_heads, seed=3) + 2.0))
    ours = rand(v_heads, k_dim, v_dim, seed=4)
    want = ours.clone()
    # Products on a card are tf32: eleven bits.
    bound = 1e-4 if INTERPRETED else 5e-3
    held, wanted = (torch.zeros(len(cuts), *ours.shape, device=ours.device) for _ in range(2))
    start, saves = ours.clone(), list(zip(cuts, held, strict=True))
    out = steady(lambda: gated_delta.chunked(inputs, ours.copy_(start), cuts, 64, saves))
    close(out, gated_reference.chunked(inputs, want, cuts, 64, list(zip(cuts, wanted, strict=True))), bound)
    close(ours, want, bound)
    close(held, wanted, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(2, 40), (9, 300), *big((1, 2048), (4000, 2048))])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_gating(rows: int, width: int, dtype: torch.dtype) -> None:
    products = rand(rows, 2 * width + 1, dtype=dtype) * 3
    products[0, 0], products[0, 1] = 200.0, -200.0
    gate, up, last = products[:, :width], products[:, width : 2 * width], products[:, 2 * width :]
    for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
        close(gating.act_mul(name, gate, up), gating_reference.act_mul(name, gate, up), ROUND[dtype])
    h, routed = up.contiguous(), rand(rows, width)
    for shared in (None, (gate.contiguous(), last)):
        want = gating_reference.add_routed(h, routed, shared)
        close(gating.add_routed(h, routed, shared), want, 2 * ROUND[dtype])
    heads = rand(rows, 5, 2 * 24, dtype=dtype)
    x, share = heads[..., :24], heads[..., 24:]
    close(gating.sigmoid_mul(x, share), gating_reference.sigmoid_mul(x, share), ROUND[dtype])
