"""The layer-step by Triton: launches as data, all within a captured graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from freetoken.core.codes import Coded, Matrix
from freetoken.core.model_config import Activation
from freetoken.kernels import _codes as codes
from freetoken.kernels import _triton
from freetoken.kernels._gate import gate_consts
from freetoken.kernels._triton import Card, Launch, card, power_of_two
from freetoken.kernels.expert_step import _ahead, _coded, _look_up, _tiles
from freetoken.kernels.expert_step._types import Call, Io, Place, Table

RANK = 20
PLAIN_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
AGE_BLOCK = 1024
COPY_BLOCKS, COPY_WORDS = 16, 2048
"""A prefetch keeps 256 KB on their way, several times what the link holds, and leaves most SMs alone."""
MOVE_BLOCKS = 64
SPILLS = {"look_up": 256, "look_ahead": 320, "promote": 512}
"""Bytes a thread may spill: comparing all pairs of 256 experts doesn't fit its registers."""
MOST_ROUTES = 64
"""Pairs of more don't fit the registers: comparing 128 routes spills more than comparing 256 experts."""
COMBINED = 8192
"""Partials that a block of `combine` has on their way, in pieces of 64 bytes at least."""
VECTOR_ROWS = 16
"""Up to so many rows most experts have one or two: products with vectors, as many as an expert has rows."""


def supports(device_type: str) -> bool:
    return _triton.supports(device_type)


def num_runs(num_tiles: int, tile_width: int) -> int:
    return num_tiles * (tile_width // sub_width(tile_width))


def age(table: Table) -> None:
    total = table.fast.numel()
    blocks = -(-total // AGE_BLOCK)
    Launch(_look_up.age, (blocks,), (table.words, table.fast, table.slow, total), _age_consts(table))()


def _age_consts(table: Table) -> dict[str, int]:
    return {"TWO_SPEED": table.policy == "two_speed", "B": AGE_BLOCK}


def look_up(table: Table, place: Place, call: Call) -> None:
    look_up_launch(table, place, call, card(call.x.device))()


def look_up_launch(table: Table, place: Place, call: Call, where: Card) -> Launch:
    rows, top_k = call.ids.shape
    io = call.io
    offsets = io.offsets if io is not None else (0, 0, 0, 0)
    routes = power_of_two(rows * top_k)
    block = min(2048, power_of_two(rows * place.hidden))
    spec = (place.num_tiles, place.hidden, routes, top_k, block, *offsets[:3])
    return Launch(
        _look_up.look_up,
        (1,),
        (
            call.ids,
            call.x,
            table.words,
            table.split[call.bucket],
            table.stats,
            table.slot_of,
            table.expert_of,
            table.tiles_in,
            table.fast,
            table.slow,
            table.victims,
            table.work,
            table.here,
            io.address if io is not None else 0,
            place.layer,
            rows,
        ),
        {
            "E": place.num_experts,
            "EP": power_of_two(place.num_experts),
            "K": top_k,
            "RP": _route_lanes(place, rows, top_k),
            "V": table.victims.numel(),
            "NT": place.num_tiles,
            "TWO_SPEED": table.policy == "two_speed",
            "HOST": io is not None,
            "SPEC": spec,
            "PDL": where.pdl,
        },
        warps=_warps(place, rows, top_k),
    )


def _route_lanes(place: Place, rows: int, top_k: int) -> int:
    """A lane for each route of a few rows, if a layer has more experts; 0: a lane for each expert."""
    routes = power_of_two(rows * top_k)
    return routes if routes <= MOST_ROUTES and routes < power_of_two(place.num_experts) else 0


def _warps(place: Place, rows: int, top_k: int) -> int:
    lanes = _route_lanes(place, rows, top_k) or power_of_two(place.num_experts)
    return max(1, min(8, lanes // 32))


def prepare_victims(table: Table, bound: int) -> None:
    victims_launch(table, bound)()


def victims_launch(table: Table, bound: int) -> Launch:
    slots = power_of_two(table.expert_of.numel())
    return Launch(
        _look_up.prepare_victims,
        (1,),
        (
            table.words,
            table.expert_of,
            table.tiles_in,
            table.whole,
            table.fast,
            table.slow,
            table.usable,
            table.victims,
            bound,
        ),
        {"V": table.victims.numel(), "SP": slots, "TWO_SPEED": table.policy == "two_speed"},
        warps=8 if slots >= 2048 else 4,
    )


def look_ahead(table: Table, place: Place, now: Tensor, soon: Tensor) -> None:
    look_ahead_launch(table, place, now, soon)()


def look_ahead_launch(table: Table, place: Place, now: Tensor, soon: Tensor) -> Launch:
    rows, top_k = now.shape
    residency = (table.slot_of, table.expert_of, table.tiles_in, table.fast, table.slow, table.victims)
    return Launch(
        _ahead.look_ahead,
        (1,),
        (now, soon, table.stats, *residency, table.ahead, table.budget, place.layer, rows),
        {
            "E": place.num_experts,
            "EP": power_of_two(place.num_experts),
            "K": top_k,
            "RP": _route_lanes(place, rows, top_k),
            "V": table.victims.numel(),
            "NT": place.num_tiles,
            "TWO_SPEED": table.policy == "two_speed",
        },
        warps=_warps(place, rows, top_k),
    )


def seed(table: Table, place: Place, ids: Tensor) -> None:
    seed_launch(table, place, ids)()


def seed_launch(table: Table, place: Place, ids: Tensor) -> Launch:
    consts = {
        "E": place.num_experts,
        "EP": power_of_two(place.num_experts),
        "B": max(8, min(64, 4096 // power_of_two(place.num_experts))),
        "TWO_SPEED": table.policy == "two_speed",
    }
    return Launch(_ahead.seed, (1,), (ids, table.counts, table.slow, place.layer, ids.numel()), consts)


def promote(table: Table, place: Place, addresses: Tensor, span: tuple[int, int], quota: int) -> None:
    promote_launch(table, place, addresses, span, quota)()


def promote_launch(
    table: Table, place: Place, addresses: Tensor, span: tuple[int, int], quota: int
) -> Launch:
    residency = (table.slot_of, table.expert_of, table.tiles_in, table.fast, table.slow, table.victims)
    told = (addresses, table.counts, table.words, table.stats)
    return Launch(
        _ahead.promote,
        (1,),
        (*told, *residency, table.ahead, place.layer, *span, quota),
        {
            "E": place.num_experts,
            "EP": power_of_two(place.num_experts),
            "V": table.victims.numel(),
            "NT": place.num_tiles,
            "TWO_SPEED": table.policy == "two_speed",
        },
        warps=4 if place.num_experts <= 128 else 8,
    )


def fetch_ahead(table: Table, place: Place, addresses: Tensor | None) -> None:
    fetch_launch(table, place, addresses)()


def fetch_launch(table: Table, place: Place, addresses: Tensor | None) -> Launch:
    return Launch(
        _ahead.fetch_ahead,
        (COPY_BLOCKS if addresses is None else MOVE_BLOCKS,),
        (
            table.ahead,
            addresses,
            place.address,
            place.records.shape[1],
            place.slots_address,
            place.slots.shape[1],
            place.tiles_offset,
            place.tile_bytes,
            place.slow_link if addresses is None else None,
            place.layer * place.num_experts,
        ),
        {"V": table.victims.numel(), "WORDS": COPY_WORDS},
        warps=8,
    )


def run_tiles(table: Table, place: Place, call: Call) -> None:
    run_launch(table, place, call, card(call.x.device))()


def sub_width(tile_width: int) -> int:
    """Columns of a block: half a tile keeps twice as many loads in flight (measured)."""
    return min(tile_width & -tile_width, 16)


def run_launch(table: Table, place: Place, call: Call, where: Card) -> Launch:
    rows, top_k = call.ids.shape
    coded = place.coded
    sub = sub_width(coded.tile_width)
    consts = {
        "K": top_k,
        "KP": power_of_two(top_k),
        "H": coded.hidden,
        "W": coded.tile_width,
        "SUB": sub,
        "NT": coded.num_tiles,
        "BIAS": coded.bias_offset,
        "PDL": where.pdl,
    } | gate_consts(place.activation)
    few = rows > VECTOR_ROWS
    plan = _plain_blocks if coded.plain == PLAIN_TYPES[call.x.dtype] else _coded_blocks
    kernel, blocks, registers = plan(coded, sub, rows if few else 0)
    return Launch(
        kernel,
        (coded.num_tiles * (coded.tile_width // sub), min(place.num_experts, rows * top_k)),
        (
            call.x,
            call.ids,
            table.work,
            call.partials,
            place.address,
            place.records.shape[1],
            place.slots_address,
            place.slots.shape[1],
            coded.tiles_offset,
            coded.tile_bytes,
            place.slow_link,
            rows,
        ),
        consts | blocks,
        warps=4,
        registers=registers,
    )


def _plain_blocks(coded: Coded, sub: int, many: int) -> tuple[Any, dict[str, Any], int]:
    """Kernel, its sizes and registers (0 = any) for `many` rows together, 0 = one after the other."""
    wide = power_of_two(coded.hidden)
    if many:
        return _tiles.few_rows, {"BH": min(128, wide), "STAGES": 2, "TP": max(16, power_of_two(many))}, 0
    # A warp holds whole columns of down then, so that its sum needs nobody else. Three blocks a
    # multiprocessor (measured: 23 us, else 27).
    return _tiles.vector_rows, {"BH": min(256, wide), "BD": min(1024, wide)}, 168


def _coded_blocks(coded: Coded, sub: int, many: int) -> tuple[Any, dict[str, Any], int]:
    gate, up, down = (codes.meaning(m, coded.hidden) for m in coded.matrices)
    consts: dict[str, Any] = {"GATE": gate, "UP": up, "DOWN": down, "REGIONS": codes.regions(coded, sub)}
    wide = power_of_two(coded.hidden)
    if many:
        sizes = {"BU": min(4, power_of_two(-(-coded.hidden // codes.LANES))), "BD": min(128, wide)}
        return _coded.coded_few_rows, consts | sizes | {"TP": max(16, power_of_two(many))}, 0
    bits = min(gate[11], up[11])
    step = min(2048 // bits, max(512 // bits, wide))  # a line of words at least
    # Four blocks a multiprocessor, or three where a table, a second plane or zero points take the registers.
    crowded = any(m.level == "iq4" or len(m.planes) > 1 or len(m.least) > 2 for m in coded.matrices)
    registers = 168 if crowded else 128
    return _coded.coded_vector_rows, consts | {"STEP": step, "BD": min(512, wide)}, registers


def combine(table: Table, place: Place, call: Call, residual: Tensor | None = None) -> Tensor:
    kind = torch.float32 if residual is None else residual.dtype
    out = torch.empty(call.x.shape[0], place.hidden, dtype=kind, device=call.x.device)
    where = card(call.x.device)
    if call.io is not None:
        wait_launch(table, call.io, where)()
    combine_launch(table, place, call, residual, out, where)()
    return out


def wait_launch(table: Table, io: Io, where: Card) -> Launch:
    return Launch(_tiles.wait, (1,), (table.words, io.address), {"PDL": where.pdl}, warps=1)


def combine_launch(
    table: Table, place: Place, call: Call, residual: Tensor | None, out: Tensor, where: Card
) -> Launch:
    rows, top_k = call.ids.shape
    per = place.coded.tile_width // sub_width(place.coded.tile_width)
    ranks = power_of_two(top_k)
    runs = min(power_of_two(place.num_tiles * per), max(1, COMBINED // (16 * ranks)))
    block = max(16, min(64, COMBINED // (runs * ranks)))
    return Launch(
        _tiles.combine,
        (rows, -(-place.hidden // block)),
        (
            call.ids,
            call.weights,
            call.partials,
            table.here,
            call.io.address if call.io is not None else 0,
            residual,
            out,
            rows,
        ),
        {
            "K": top_k,
            "KP": ranks,
            "H": place.hidden,
            "NT": place.num_tiles,
            "PER": per,
            "BR": runs,
            "BC": block,
            "HOST": call.io is not None,
            "OUT": call.io.offsets[3] if call.io is not None else 0,
            "PDL": where.pdl,
        },
        warps=4,
    )


def plain_record(dtype: torch.dtype, hidden: int, width: int, tiles: int) -> Coded:
    """A record of numbers of dtype."""
    size = width * hidden * dtype.itemsize
    gate, up, down = (
        Matrix(((8 * dtype.itemsize, order * size),), PLAIN_TYPES[dtype], (), words=False, down=order == 2)
        for order in range(3)
    )
    return Coded(hidden, width, tiles, 3 * size, 0, (gate, up, down))


def specimens(dtype: torch.dtype) -> Iterator[Callable[[Card], list[Launch]]]:
    """What is compiled ahead of time: (E, top_k, H, tile width, tiles), rows, whether a host helps."""
    for geometry, rows, host in (
        ((128, 8, 2048, 32, 24), 1, True),
        ((256, 8, 2048, 32, 16), 4, False),
        ((32, 4, 2880, 32, 90), 64, True),
    ):
        yield functools.partial(_specimen, dtype, geometry, rows, host)
    yield functools.partial(_over_a_played_link, dtype)


def coded_specimen(
    coded: Coded, experts: int, rows: int, dtype: torch.dtype, act: Activation, where: Card
) -> Launch:
    """The arithmetic over records of some format, as data."""
    geometry = (experts, 8 if experts > 32 else 4)
    return run_launch(*_pretend(coded, geometry, rows, dtype, act), where)


def _pretend(
    coded: Coded, geometry: tuple[int, int], rows: int, dtype: torch.dtype, act: Activation
) -> tuple[Table, Place, Call]:
    """Table, place and call of (E, top_k), without a byte."""
    experts, top_k = geometry

    def ints(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    table = Table.empty([coded.num_tiles] * 48, experts, 4095, "meta")
    raw = torch.empty(0, 4096, dtype=torch.uint8, device="meta")
    place = Place(1, experts, raw, 1 << 40, raw, coded, act)
    io = Io(1 << 41, raw, *(ints(16) for _ in range(5)), raw, raw, (256, 4096, 8192, 1 << 20))
    x = torch.empty(rows, coded.hidden, dtype=dtype, device="meta")
    weights = torch.empty(rows, top_k, device="meta")
    return table, place, Call(x, ints(rows, top_k), weights, weights, io)


def _specimen(
    dtype: torch.dtype, geometry: tuple[int, ...], rows: int, host: bool, where: Card
) -> list[Launch]:
    experts, top_k, hidden, width, tiles = geometry
    coded = plain_record(dtype, hidden, width, tiles)
    table, place, call = _pretend(coded, (experts, top_k), rows, dtype, Activation())
    io, total = call.io, table.fast.numel()
    assert io is not None
    addresses = torch.empty(experts, dtype=torch.int64, device="meta")
    call = call if host else replace(call, io=None)
    return [
        Launch(_look_up.age, (1,), (table.words, table.fast, table.slow, total), _age_consts(table)),
        look_up_launch(table, place, call, where),
        victims_launch(table, experts),
        look_ahead_launch(table, place, call.ids, call.ids),
        fetch_launch(table, place, None),
        seed_launch(table, place, call.ids),
        promote_launch(table, place, addresses, (0, experts), 8),
        fetch_launch(table, place, addresses),
        run_launch(table, place, call, where),
        *([wait_launch(table, io, where)] if host else []),
        combine_launch(table, place, call, call.x, call.x, where),
    ]


def _over_a_played_link(dtype: torch.dtype, where: Card) -> list[Launch]:
    link = torch.empty(4, dtype=torch.int64, device="meta")
    found = []
    for rows in (1, 64):
        asked = _pretend(plain_record(dtype, 2048, 32, 24), (128, 8), rows, dtype, Activation())
        table, place, call = asked[0], replace(asked[1], slow_link=link), asked[2]
        found += [fetch_launch(table, place, None), run_launch(table, place, call, where)]
    return found
