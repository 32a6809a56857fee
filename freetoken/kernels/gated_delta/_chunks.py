"""The chunked gated delta rule as five launches, of which one walks the chunks in order.

A chunk of up to 64 tokens obeys (I + A) u = beta (v - exp(c) k S), see reference.py. With T = (I + A)^-1:
    chunk_system    c (summed decay), A; keys' lengths on the way       every chunk and head by itself
    invert          T in place of A: 16 x 16 blocks by substitution, then merged; no power of A, which
                    would lose its digits to cancellation                "
    chunk_parts     base = T beta v,  factor = T beta exp(c) k           "
    walk_states     update = base - factor S;  S = exp(c_last) S + ...   every head and run of columns
    chunk_outputs   exp(c) q S + (q k^T, decayed, causal) update         every chunk and head by itself
All in float32, products as tf32 (A and T as three of them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels._triton import Card, Launch, jit, power_of_two, tl

CHUNK = 64


@jit
def _tokens(starts, chunk, CHUNK: tl.constexpr):
    """A chunk's tokens int64 [CHUNK], and which of them it has."""
    start, stop = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    token = start + tl.arange(0, CHUNK)
    return token.to(tl.int64), token < stop


@jit
def _rows(pointer, token, used, row_stride, dim, D: tl.constexpr):
    """Rows [CHUNK, dims] of one head, zero where the chunk is shorter."""
    at = pointer + token[:, None] * row_stride + dim[None, :]
    return tl.load(at, mask=used[:, None] & (dim < D)[None, :], other=0.0)


@jit
def chunk_system(
    k, g, beta, starts, sums, lengths, system, k_stride, H,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    token, used = _tokens(starts, chunk, CHUNK)
    squares, product = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, DP, BD):
        rows = _rows(k + (head // G) * D, token, used, k_stride, first + tl.arange(0, BD), D)
        squares += tl.sum(rows * rows, 1)
        product = tl.dot(rows, tl.trans(rows), product, input_precision="tf32x3")
    length = tl.rsqrt(squares + 1e-6)
    decay = tl.load(g + token * H + head, mask=used, other=0.0)
    share = tl.load(beta + token * H + head, mask=used, other=0.0)
    total = tl.cumsum(decay, 0)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    gap = tl.where(i > j, total[:, None] - total[None, :], float("-inf"))
    product *= tl.exp(gap) * (share * length)[:, None] * length[None, :]
    spot = (chunk * H + head).to(tl.int64)
    line = spot * CHUNK + tl.arange(0, CHUNK)
    tl.store(sums + line, total)
    tl.store(lengths + line, length)
    tl.store(system + spot * CHUNK * CHUNK + i * CHUNK + j, product)


@jit
def _invert_block(block, i, j, CHUNK: tl.constexpr):
    """(I + A)^-1 of a 16 x 16 block, row by row; `block` points at its corner."""
    inverse = -tl.load(block + i * CHUNK + j)
    for r in range(2, 16):
        line = -tl.load(block + r * CHUNK + tl.arange(0, 16))
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(i == r, line[None, :], inverse)
    return tl.where(i == j, 1.0, inverse)


@jit
def _times(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def invert(system, CHUNK: tl.constexpr):
    base = system + tl.program_id(0).to(tl.int64) * CHUNK * CHUNK
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    down: tl.constexpr = 16 * CHUNK
    spot = base + i * CHUNK + j
    t11 = _invert_block(base, i, j, CHUNK)
    t22 = _invert_block(base + down + 16, i, j, CHUNK)
    t33 = _invert_block(base + 2 * down + 32, i, j, CHUNK)
    t44 = _invert_block(base + 3 * down + 48, i, j, CHUNK)
    a21, a31, a41 = tl.load(spot + down), tl.load(spot + 2 * down), tl.load(spot + 3 * down)
    a32, a42 = tl.load(spot + 2 * down + 16), tl.load(spot + 3 * down + 16)
    a43 = tl.load(spot + 3 * down + 32)
    t21 = -_times(t22, _times(a21, t11))
    t32 = -_times(t33, _times(a32, t22))
    t43 = -_times(t44, _times(a43, t33))
    t31 = -_times(t33, _times(a31, t11) + _times(a32, t21))
    t42 = -_times(t44, _times(a42, t22) + _times(a43, t32))
    t41 = -_times(t44, _times(a41, t11) + _times(a42, t21) + _times(a43, t31))
    # What lies above the diagonal is zero already. All loads of this block come before its stores.
    tl.debug_barrier()
    tl.store(spot, t11)
    tl.store(spot + down, t21)
    tl.store(spot + down + 16, t22)
    tl.store(spot + 2 * down, t31)
    tl.store(spot + 2 * down + 16, t32)
    tl.store(spot + 2 * down + 32, t33)
    tl.store(spot + 3 * down, t41)
    tl.store(spot + 3 * down + 16, t42)
    tl.store(spot + 3 * down + 32, t43)
    tl.store(spot + 3 * down + 48, t44)


@jit
def chunk_parts(
    k, v, beta, starts, sums, lengths, system, base, factor, k_stride, v_stride, H,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    spot = (chunk * H + head).to(tl.int64)
    step = tl.arange(0, CHUNK)
    token, used = _tokens(starts, chunk, CHUNK)
    inverse = tl.load(system + spot * CHUNK * CHUNK + step[:, None] * CHUNK + step[None, :])
    share = tl.load(beta + token * H + head, mask=used, other=0.0)
    line = (spot * CHUNK + step)[:, None]
    if part < tl.cdiv(DV, BD):
        dim = part * BD + tl.arange(0, BD)
        rows = _rows(v + head * DV, token, used, v_stride, dim, DV)
        made = tl.dot(inverse, rows * share[:, None], input_precision="tf32")
        tl.store(base + line * DV + dim[None, :], made, mask=(dim < DV)[None, :])
    else:
        dim = (part - tl.cdiv(DV, BD)) * BD + tl.arange(0, BD)
        share *= tl.load(lengths + spot * CHUNK + step) * tl.exp(tl.load(sums + spot * CHUNK + step))
        rows = _rows(k + (head // G) * DK, token, used, k_stride, dim, DK)
        made = tl.dot(inverse, rows * share[:, None], input_precision="tf32")
        tl.store(factor + line * DK + dim[None, :], made, mask=(dim < DK)[None, :])


@jit(varying=("count",))
def walk_states(
    k, starts, sums, lengths, base, factor, states, state, k_stride, H, count,
    G: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    i, j, step = tl.arange(0, DKP), tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
    inside, real = (i < DK)[:, None] & (j < DV)[None, :], (j < DV)[None, :]
    place = i[:, None] * DV + j[None, :]
    matrix = tl.load(state + head * DK * DV + place, mask=inside, other=0.0)
    for chunk in range(count):
        spot = (chunk * H + head).to(tl.int64)
        line = (spot * CHUNK + step)[:, None]
        tl.store(states + spot * DK * DV + place, matrix, mask=inside)
        part = tl.load(factor + line * DK + i[None, :], mask=(i < DK)[None, :], other=0.0)
        update = tl.load(base + line * DV + j[None, :], mask=real, other=0.0)
        update -= tl.dot(part, matrix, input_precision="tf32")
        tl.store(base + line * DV + j[None, :], update, mask=real)
        total = tl.load(sums + spot * CHUNK + step)
        last = tl.load(sums + spot * CHUNK + CHUNK - 1)
        share = tl.load(lengths + spot * CHUNK + step) * tl.exp(last - total)
        token, used = _tokens(starts, chunk, CHUNK)
        rows = _rows(k + (head // G) * DK, token, used, k_stride, i, DK)
        matrix *= tl.exp(last)
        matrix += tl.dot(tl.trans(rows), update * share[:, None], input_precision="tf32")
    tl.store(state + head * DK * DV + place, matrix, mask=inside)


@jit
def chunk_outputs(
    q, k, starts, sums, lengths, base, states, out, q_stride, k_stride, scale, H,
    G: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    spot = (chunk * H + head).to(tl.int64)
    j, step = tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, CHUNK)
    token, used = _tokens(starts, chunk, CHUNK)
    real = (j < DV)[None, :]
    squares, within = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    mixed = tl.zeros([CHUNK, BV], tl.float32)
    for first in range(0, DKP, BD):
        dim = first + tl.arange(0, BD)
        rows = _rows(q + (head // G) * DK, token, used, q_stride, dim, DK)
        keys = _rows(k + (head // G) * DK, token, used, k_stride, dim, DK)
        squares += tl.sum(rows * rows, 1)
        within = tl.dot(rows, tl.trans(keys), within, input_precision="tf32")
        at = states + spot * DK * DV + dim[:, None] * DV + j[None, :]
        matrix = tl.load(at, mask=(dim < DK)[:, None] & real, other=0.0)
        mixed = tl.dot(rows, matrix, mixed, input_precision="tf32")
    length = tl.rsqrt(squares + 1e-6) * scale
    total = tl.load(sums + spot * CHUNK + step)
    gap = tl.where(step[:, None] >= step[None, :], total[:, None] - total[None, :], float("-inf"))
    within *= tl.exp(gap) * tl.load(lengths + spot * CHUNK + step)[None, :]
    mixed *= tl.exp(total)[:, None]
    update = tl.load(base + (spot * CHUNK + step)[:, None] * DV + j[None, :], mask=real, other=0.0)
    mixed = tl.dot(within, update, mixed, input_precision="tf32") * length[:, None]
    to = out + (token * H + head)[:, None] * DV + j[None, :]
    tl.store(to, mixed, mask=used[:, None] & real)


def plan(
    inputs: tuple[Tensor, ...], state: Tensor, starts: Tensor, out: Tensor, where: Card
) -> tuple[list[Launch], Tensor]:
    """Launches for the chunks that start at `starts` int32 [chunks + 1]; state [Hv, Dk, Dv] moves on.

    The second is where the launches leave the state ahead of each chunk, float32 [chunks, Hv, Dk, Dv].
    """
    q, k, v, g, beta = inputs
    (heads, k_dim, v_dim), chunks = state.shape, starts.shape[0] - 1

    def empty(*shape: int) -> Tensor:
        return torch.empty(chunks, heads, *shape, dtype=torch.float32, device=out.device)

    sums, lengths, system = empty(CHUNK), empty(CHUNK), empty(CHUNK, CHUNK)
    base, factor, states = empty(CHUNK, v_dim), empty(CHUNK, k_dim), empty(k_dim, v_dim)
    kp, vp = max(16, power_of_two(k_dim)), max(16, power_of_two(v_dim))
    columns, wide, deep = min(vp, 32), min(vp, 64), min(kp, 32)
    large = where.shared_bytes > 128 << 10
    keys = {"G": heads // k.shape[1], "CHUNK": CHUNK}
    both = keys | {"DK": k_dim, "DKP": kp, "DV": v_dim}
    facts = (starts, sums, lengths)
    launches = [
        Launch(
            chunk_system,
            (chunks, heads),
            (k, g, beta, *facts, system, k.stride(0), heads),
            keys | {"D": k_dim, "DP": kp, "BD": deep},
        ),
        Launch(invert, (chunks * heads,), (system,), {"CHUNK": CHUNK}, warps=1),
        Launch(
            chunk_parts,
            (chunks, heads, -(-v_dim // 64) - (-k_dim // 64)),
            (k, v, beta, *facts, system, base, factor, k.stride(0), v.stride(0), heads),
            keys | {"DK": k_dim, "DV": v_dim, "BD": 64},
        ),
        Launch(
            walk_states,
            (heads, -(-v_dim // columns)),
            (k, *facts, base, factor, states, state, k.stride(0), heads, chunks),
            both | {"BV": columns},
            stages=2 if large else 1,
        ),
        Launch(
            chunk_outputs,
            (chunks, heads, -(-v_dim // wide)),
            (q, k, *facts, base, states, out, q.stride(0), k.stride(0), k_dim**-0.5, heads),
            both | {"BV": wide, "BD": deep},
            stages=1,  # pipelined, two chains of products gave other sums from run to run (sm_90)
        ),
    ]
    return launches, states
