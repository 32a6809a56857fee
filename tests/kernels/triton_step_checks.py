"""The Triton layer-step of experts beside its reference, step after step: integers agree bit by bit.

Run by test_triton.py, interpreted and on a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.model_config import Activation
from freetoken.core.weights import WeightFormat
from freetoken.kernels._triton import INTERPRETED
from freetoken.kernels.expert_step import EVERYONE, reference, triton
from freetoken.kernels.expert_step._types import AHEAD, FILLED, PROMOTED, Table
from freetoken.quant._mixed import MixedFormat
from tests.kernels import step_build as build

# numpy's, from the interpreter's loops with run-time bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
PLACE = "cpu" if INTERPRETED else "cuda"
STEPS = 2 if INTERPRETED else 6


def answer(shape: build.Shape, place: object, call: object) -> None:
    """What the host executor does: whole sums of its tiles, per route."""
    io, top_k = call.io, call.ids.shape[1]
    for expert, first, last, _ in io.items[: int(io.request[2])].tolist():
        for r, j in (call.ids == expert).nonzero().tolist():
            total = torch.zeros(shape.hidden)
            for tile in range(first, last):
                a = place.coded.tiles_offset + tile * place.coded.tile_bytes
                coded = place.records[expert][a : a + place.coded.tile_bytes]
                total += reference.partial(place, call.x[r : r + 1].cpu(), coded)[0]
            if first == 0 and place.coded.bias_offset:
                total += place.records[expert][: 4 * shape.hidden].view(torch.float32)
            io.out[r * top_k + j] = total
    io.reply[0] = io.request[0]


def compare(
    shape: build.Shape,
    rows: int,
    policy: str,
    alpha: float,
    *,
    host: bool,
    steps: int = 4,
    budget: int = 0,
    device: str = "cpu",
    link: Tensor | None = None,
) -> Table:
    """`shape` by the reference on the CPU, and by Triton on `device`, over a played link if one is given."""
    shapes = [shape, replace(shape, device=device)]
    tables = [build.table(one, policy, alpha, 0.7, budget) for one in shapes]
    placed = [build.places(one) for one in shapes]
    placed[1] = [replace(place, slow_link=link) for place in placed[1]]
    blocks = [build.block(one, rows) if host else None for one in shapes]
    for step in range(steps):
        for maker, table in zip((reference, triton), tables, strict=True):
            maker.age(table)
        for layer in range(shape.layers):
            outs = []
            for maker, one, table, places, io in zip(
                (reference, triton), shapes, tables, placed, blocks, strict=True
            ):
                place = places[layer]
                runs = maker.num_runs(one.tiles, one.width)
                call = build.call(one, rows, 100 * step + layer, runs, io, dead=int(rows > 2))
                maker.look_up(table, place, call)
                if io is not None and int(table.words[4]):
                    answer(one, place, call)
                maker.run_tiles(table, place, call)
                outs.append(maker.combine(table, place, call).cpu())
                maker.prepare_victims(table, EVERYONE)
                if budget and layer + 1 < shape.layers:
                    soon, _ = build.routing(one, rows, 100 * step + layer + 1 + 7 * (step % 2), int(rows > 2))
                    maker.look_ahead(table, places[layer + 1], call.ids, soon)
                    maker.fetch_ahead(table, places[layer + 1], None)
            if budget:
                brought = [t.ahead[t.ahead[:, 0].cummin(0).values >= 0].cpu() for t in tables]
                assert torch.equal(*brought)
            for name in ("slot_of", "expert_of", "fast", "slow", "victims", "words", "stats", "here", "work"):
                mine, theirs = (getattr(t, name).cpu() for t in tables)
                if name == "here":
                    used = call.ids[call.ids >= 0].long().cpu()
                    mine, theirs = mine[used], theirs[used]
                assert torch.equal(mine, theirs), (name, step, layer, mine, theirs)
            owned = tables[0].expert_of >= 0
            assert torch.equal(tables[0].tiles_in[owned], tables[1].tiles_in.cpu()[owned])
            torch.testing.assert_close(outs[1], outs[0], rtol=2e-3, atol=2e-3)
            assert torch.equal(placed[0][0].slots, placed[1][0].slots.cpu()), "slots hold other bytes"
    assert bool(tables[0].stats[AHEAD]) == (budget > 0)
    return tables[0]


@pytest.mark.parametrize(
    ("rows", "policy", "alpha", "host"),
    [
        (1, "two_speed", 0.5, True),
        (1, "lru", 0.5, True),
        (2, "two_speed", 0.5, True),  # a lane for each route
        (3, "two_speed", 0.5, True),  # for each expert
        (2, "lru", 1.0, False),
    ],
)
def test_the_device_decides_and_computes_as_the_reference(
    rows: int, policy: str, alpha: float, host: bool
) -> None:
    shape = build.Shape() if host else build.Shape(experts=6, slots=9, hidden=40)
    compare(shape, rows, policy, alpha, host=host, steps=STEPS, device=PLACE)


@pytest.mark.parametrize(("rows", "budget"), [(1, 3), (2, 7), (3, 11)])
def test_the_next_layers_tiles_are_brought_as_by_the_reference(rows: int, budget: int) -> None:
    shape = build.Shape(hidden=40)
    compare(shape, rows, "two_speed", 0.5, host=True, steps=STEPS, budget=budget, device=PLACE)


def test_the_host_takes_everything_where_it_is_told_to() -> None:
    compare(build.Shape(slots=1, top_k=3), 1, "two_speed", -1.0, host=True, steps=1, device=PLACE)


def test_many_rows_go_through_the_matrix_units() -> None:
    compare(build.Shape(layers=1, experts=4), 20, "two_speed", 1.0, host=False, steps=1, device=PLACE)


def formats() -> dict[str, WeightFormat]:
    """Every format that devices read, and one of each way of mixing them."""
    every = [choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")]
    found = {fmt.name: fmt for fmt in every if fmt.device_code(max(fmt.block, 16), 512)}
    return found | {"q4_k+q6_k": MixedFormat([found["q4_k"], found["q4_k"], found["q6_k"]])}


def coded_shape(name: str, rows: int) -> build.Shape:
    fmt = formats()[name]
    width = max(fmt.block, 32)
    experts = 2 if rows == 1 else 3
    clamped = Activation("silu", 1.702, 0.5, 1.0) if name == "mxfp4" else Activation()
    hidden = 256 if fmt.block > 32 else 96 if fmt.name == "mxfp4" else 64
    biased = name in ("mxfp4", "q8_0", "f16")
    geometry = {"hidden": hidden, "tiles": 2 if width == 32 else 1, "width": width, "slots": 1}
    return build.Shape(1, experts, 1, **geometry, fmt=fmt, biased=biased, activation=clamped)


DEFAULT = ("mxfp4", "fp8_block", "q5_1", "q8_0")
"""One of each way that codes lie: words, bytes, two planes; a least; scales of blocks and of columns."""


def some(names: Iterable[str], default: Sequence[str] = DEFAULT) -> list[object]:
    return [pytest.param(name, marks=() if name in default else pytest.mark.soak) for name in names]


@pytest.mark.parametrize("name", some(formats()))
def test_coded_records_are_computed_from_their_bytes(name: str) -> None:
    """Arriving and kept, arriving and not kept, resident: the same as by the reference."""
    compare(coded_shape(name, 1), 1, "lru", 1.0, host=False, steps=2, device=PLACE)


@pytest.mark.parametrize("name", some(["mxfp4", "q6_k", "q8_0", "f32"], ["mxfp4"]))
def test_many_rows_of_coded_records_go_through_the_matrix_units(name: str) -> None:
    compare(coded_shape(name, 20), 20, "two_speed", 1.0, host=False, steps=1, device=PLACE)


@pytest.mark.parametrize(
    ("shape", "rows", "budget"),
    [
        (build.Shape(hidden=40), 1, 5),
        (build.Shape(layers=1, experts=4), 20, 0),
        (coded_shape("mxfp4", 1), 1, 0),
        (coded_shape("mxfp4", 20), 20, 0),
    ],
    ids=["one row", "many rows", "codes", "many rows of codes"],
)
def test_over_a_played_link_the_same_is_computed_and_what_comes_is_booked(
    shape: build.Shape, rows: int, budget: int
) -> None:
    a_byte_a_ns = 1 << 20
    link = torch.tensor([0, 0, a_byte_a_ns, 0], device=PLACE)
    host = rows < 20 and shape.fmt is None
    table = compare(shape, rows, "two_speed", 0.5, host=host, steps=2, budget=budget, device=PLACE, link=link)
    came = int(table.stats[FILLED] + table.stats[AHEAD]) * shape.coded.tile_bytes
    assert came > 0
    if INTERPRETED:  # no timer: the link has been free since 0
        assert int(link[0]) == came
    else:
        assert int(link[0]) > came


@pytest.mark.parametrize("policy", ["two_speed", "lru"])
def test_a_prompt_leaves_behind_what_the_reference_would(policy: str) -> None:
    shapes = [build.Shape(slots=14, hidden=40), build.Shape(slots=14, hidden=40, device=PLACE)]
    tables = [build.table(one, policy) for one in shapes]
    placed = [build.places(one) for one in shapes]
    copies = [
        [place.records.to(one.device) for place in places] for one, places in zip(shapes, placed, strict=True)
    ]
    experts = shapes[0].experts
    for turn in range(2):
        for layer in range(shapes[0].layers):
            last = build.routing(shapes[0], 12, 50 * turn + layer)[0]
            for span in ((0, 3), (3, experts)):
                for maker, one, table, places, copied in zip(
                    (reference, triton), shapes, tables, placed, copies, strict=True
                ):
                    place = places[layer]
                    if span[0] == 0:
                        maker.age(table)
                        maker.look_up(table, place, build.call(one, 1, turn, 1))
                        maker.run_tiles(
                            table, place, build.call(one, 1, turn, maker.num_runs(one.tiles, one.width))
                        )
                        maker.seed(table, place, last.to(one.device))
                    inside = torch.zeros(experts, dtype=torch.int64)
                    for expert in range(*span):
                        inside[expert] = copied[layer][expert].data_ptr() if expert != 4 else 0
                    maker.prepare_victims(table, layer * experts + span[1])
                    maker.promote(table, place, inside.to(one.device), span, 3)
                    maker.fetch_ahead(table, place, inside.to(one.device))
                for name in ("slot_of", "expert_of", "fast", "slow", "victims", "stats", "counts"):
                    mine, theirs = (getattr(t, name).cpu() for t in tables)
                    assert torch.equal(mine, theirs), (name, turn, layer, span, mine, theirs)
                owned = tables[0].expert_of >= 0
                assert torch.equal(tables[0].tiles_in[owned], tables[1].tiles_in.cpu()[owned])
                assert torch.equal(placed[0][0].slots, placed[1][0].slots.cpu()), "slots hold other bytes"
    assert int(tables[0].stats[PROMOTED]) > 3
