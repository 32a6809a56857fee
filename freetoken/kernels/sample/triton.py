"""All draws of a step in two launches, or three; what they ask and tell the host lies in memory of both.

    survey   a block for each BLOCK logits of a row: the largest and its lowest id, whether all are finite,
             and where the row samples the sum of its weights, or the largest of each GROUP logits
    finish   a block for each choice: reduces that, draws, writes the token for the device and for the host

Weights are exp((x - largest) / temperature). Without a limit, the sums of blocks say in which block u lies,
and one pass over that block where. `_few` draws of up to MOST_KEPT tokens, `_many` of any limited number,
which takes a launch more, between these two.

`asked` is complete before `survey` starts, which waits before it lets another start: that may read it early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freetoken.kernels import _pdl as pdl
from freetoken.kernels._triton import Card, Launch, aligned, card, jit, tl
from freetoken.kernels._triton import supports as supports
from freetoken.kernels.sample._few import draw_few
from freetoken.kernels.sample._many import LISTED, STEPS, draw_many, weigh
from freetoken.kernels.sample._numbers import (
    ADJUSTED,
    ANY,
    FEW,
    FORCED,
    ID,
    KIND,
    LARGEST,
    MANY,
    MOST_KEPT,
    ROW,
    SOURCE,
    TEMPERATURE,
    WORDS,
    U,
    read,
    real,
    weight_of,
    where_of,
)
from freetoken.kernels.sample._types import ASKED, TOLD, Choice, Slip

RANK = 20
BLOCK, GROUP = 2048, 64
LEAST_TEMPERATURE = 1e-30
MANY_REGISTERS = 200
"""Left to itself the compiler stops at 128 and spills."""


@jit
def survey(
    logits,
    asked,
    numbers,
    marks,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SAMPLES: tl.constexpr,
    VECTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    """SAMPLES false: each choice takes the largest of the row of its own number, or what it is given."""
    pdl.await_previous(PDL)
    pdl.let_next_start(PDL)
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    block, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    asked += entry * WORDS
    source = entry
    if SAMPLES:
        source = tl.load(asked + SOURCE)
    raw = tl.load(logits + source * V + at, mask=at < V, other=0.0)
    finite = tl.min(tl.min((tl.abs(raw) < float("inf")).to(tl.int32), 1), 0)
    x = tl.where((at < V) & (raw < float("inf")), raw, float("-inf"))
    if SAMPLES:
        other = tl.load(asked + ADJUSTED)
        if other != 0:
            x = read(where_of(logits, asked, V, VECTORS), at, at < V)
    tops = tl.max(x, 1)
    largest = tl.max(tops, 0)
    first = tl.min(tl.min(tl.where(x == largest, at, V), 1), 0)
    numbers += entry * (2 * BLOCKS + GROUPS + MOST_KEPT)
    marks += entry * (2 * BLOCKS + 2 * MOST_KEPT)
    tl.store(numbers + block, largest)
    tl.store(marks + block, first)
    tl.store(marks + BLOCKS + block, finite)
    if SAMPLES:
        kind = tl.load(asked + KIND)
        if kind == ANY:
            weight = weight_of(x, largest, real(asked, TEMPERATURE).to(tl.float32))
            tl.store(numbers + BLOCKS + block, tl.sum(tl.sum(weight, 1), 0))
        elif kind == FEW:
            tl.store(numbers + 2 * BLOCKS + group, tops, mask=group < GROUPS)


@jit
def draw_any(row, sums, lane, largest, top, temperature, u, V: tl.constexpr, BLOCK: tl.constexpr):
    """A token of all, by their ids; sums float32: each block's weights beside its own largest."""
    share = (sums * weight_of(largest, top, temperature)).to(tl.float64)
    upto = tl.cumsum(share, 0)
    target = u * tl.max(upto, 0)
    past = tl.min(tl.where((upto > target) & (share > 0), lane, V), 0)
    block = tl.minimum(past, tl.max(tl.where(share > 0, lane, 0), 0))
    here = lane == block
    own = tl.maximum(tl.sum(tl.where(here, share, 0.0), 0), 1e-30)  # none where nothing is finite
    part = (target - tl.sum(tl.where(here, upto - share, 0.0), 0)) / own
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = read(row, at, at < V)
    weight = weight_of(x, tl.max(x, 0), temperature)
    upto_here = tl.cumsum(weight, 0)
    goal = tl.minimum(tl.maximum(part, 0.0), 1.0).to(tl.float32) * tl.max(upto_here, 0)
    past = tl.min(tl.where((upto_here > goal) & (weight > 0), at, V), 0)
    return tl.minimum(past, tl.max(tl.where(weight > 0, at, 0), 0))


@jit(varying=["rows"])
def finish(
    logits,
    asked,
    numbers,
    marks,
    masses,
    values,
    ids,
    last_tokens,
    told,
    rows,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SAMPLES: tl.constexpr,
    VECTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    GROUPS: tl.constexpr = (V + GROUP - 1) // GROUP
    WIDE: tl.constexpr = 1 << (max(BLOCKS, 32) - 1).bit_length()
    entry = tl.program_id(0).to(tl.int64)
    asked += entry * WORDS
    kind, to, given = tl.load(asked + KIND), tl.load(asked + ROW), tl.load(asked + ID)
    pdl.await_previous(PDL)
    numbers += entry * (2 * BLOCKS + GROUPS + MOST_KEPT)
    marks += entry * (2 * BLOCKS + 2 * MOST_KEPT)
    lane = tl.arange(0, WIDE)
    largest = tl.load(numbers + lane, mask=lane < BLOCKS, other=float("-inf"))
    firsts = tl.load(marks + lane, mask=lane < BLOCKS, other=V)
    finite = tl.min(tl.load(marks + BLOCKS + lane, mask=lane < BLOCKS, other=1), 0)
    top = tl.max(largest, 0)
    token = tl.min(tl.where(largest == top, firsts, V), 0)
    if SAMPLES:
        if kind == ANY:
            sums = tl.load(numbers + BLOCKS + lane, mask=lane < BLOCKS, other=0.0)
            row = where_of(logits, asked, V, VECTORS)
            temperature = real(asked, TEMPERATURE).to(tl.float32)
            token = draw_any(row, sums, lane, largest, top, temperature, real(asked, U), V, BLOCK)
        elif kind == FEW:
            row = where_of(logits, asked, V, VECTORS)
            token = draw_few(row, asked, numbers + 2 * BLOCKS, marks + 2 * BLOCKS, top, V, GROUP)
        if masses is not None:
            row = where_of(logits, asked, V, VECTORS)
            if kind == MANY:
                lists = values + entry * LISTED, ids + entry * LISTED
                token = draw_many(row, asked, masses + entry * (2 * STEPS * BLOCKS), *lists, top, V, BLOCKS)
    if kind == FORCED:
        token = given.to(tl.int32)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # whatever a bad row came to
    tl.store(last_tokens + to, token.to(tl.int64))
    tl.store(told + entry, token.to(tl.int64))
    tl.store(told + rows + entry, (1 - finite).to(tl.int64))


def sample(logits: Tensor, choices: Sequence[Choice], last_tokens: Tensor, slip: Slip) -> None:
    if not choices:
        return
    logits = logits.contiguous()
    kinds = note(choices, logits.shape[1], slip.asked)
    asked, samples = slip.asked, needs_survey(choices)
    if samples:
        asked = asked.to(logits.device, non_blocking=True)
    room = Room.of(len(choices), logits.shape[1], MANY.value in kinds, logits.device)
    for launch in plan(logits, asked, room, (last_tokens, slip.told), samples, card(logits.device)):
        launch()


def note(choices: Sequence[Choice], vocab: int, asked: Tensor) -> set[int]:
    """Write down what the kernels read; returns the kinds."""
    words, reals = [], []
    for c in choices:
        kept, kind = c.kept(vocab), LARGEST.value
        if c.forced >= 0:
            kind = FORCED.value
        elif c.temperature > 0:
            kind = ANY.value if not kept else FEW.value if kept <= MOST_KEPT.value else MANY.value
        adjusted = c.adjusted.data_ptr() if c.adjusted is not None else 0
        words.append((kind, c.row, c.source, adjusted, c.forced, kept))
        reals.append((c.u, max(c.temperature, LEAST_TEMPERATURE), c.top_p, c.min_p))
    table = asked.numpy()
    table[:, : U.value], table[:, U.value :] = words, np.array(reals).view(np.int64)
    return {word[0] for word in words}


def needs_survey(choices: Sequence[Choice]) -> bool:
    """Whether blocks of a row have to know the choice."""
    return any(
        c.source != i or c.adjusted is not None or (c.temperature > 0 and c.forced < 0)
        for i, c in enumerate(choices)
    )


class Room(NamedTuple):
    """What one launch leaves for the next: numbers float32, marks int32; for `_many` its masses and lists."""

    numbers: Tensor
    marks: Tensor
    masses: Tensor | None
    values: Tensor | None
    ids: Tensor | None

    @staticmethod
    def of(rows: int, vocab: int, many: bool, device: torch.device | str) -> Room:
        def empty(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        blocks, groups, most = -(-vocab // BLOCK), -(-vocab // GROUP), MOST_KEPT.value
        numbers = empty(2 * blocks + groups + most, torch.float32)
        marks = empty(2 * blocks + 2 * most, torch.int32)
        if not many:
            return Room(numbers, marks, None, None, None)
        masses, listed = empty(2 * STEPS.value * blocks, torch.int64), LISTED.value
        return Room(numbers, marks, masses, empty(listed, torch.float32), empty(listed, torch.int32))


def plan(
    logits: Tensor, asked: Tensor, room: Room, to: tuple[Tensor, Tensor], samples: bool, where: Card
) -> list[Launch]:
    """to: last_tokens and a slip's `told`."""
    rows, vocab = asked.shape[0], logits.shape[1]
    grid, many = (-(-vocab // BLOCK), rows), room.masses is not None
    vectors = vocab % 4 == 0 and aligned(logits)
    how = {"V": vocab, "BLOCK": BLOCK, "GROUP": GROUP, "VECTORS": vectors, "PDL": where.pdl}
    consts = {**how, "SAMPLES": samples}
    return [
        Launch(survey, grid, (logits, asked, room.numbers, room.marks), consts),
        *([Launch(weigh, grid, (logits, asked, room.numbers, room.masses), how)] if many else []),
        Launch(
            finish, (rows,), (logits, asked, *room, *to, rows), consts,
            warps=8 if samples else 1, registers=MANY_REGISTERS if many else 0,
        ),
    ]  # fmt: skip


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    def one(rows: int, vocab: int, samples: bool, many: bool) -> Callable[[Card], list[Launch]]:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        logits, room = empty(rows, vocab, dtype=torch.float32), Room.of(rows, vocab, many, "meta")
        to = empty(rows + 1), empty(TOLD, rows)
        return lambda where: plan(logits, empty(rows, ASKED), room, to, samples, where)

    for vocab in (151936, 201088, 262144, 300):
        for samples, many in ((False, False), (True, False), (True, True)):
            yield one(3 if samples else 1, vocab, samples, many)
