"""A layer-step of routed experts whose residency lives on the device: look up, compute, add.

    age(table)                                   once a step: the policy's averages, the step's number
    look_up(table, place, call)                  one layer-step: who is here, who comes, who is the host's
    prepare_victims(table, bound)                the coldest residents, for the next look-up
    run_tiles(table, place, call)                partial outputs of resident and arriving tiles
    combine(table, place, call, residual)        float32 [T, H]: the sum over routes, ascending expert id;
                                                 with a residual [T, H]: that + the sum rounded to its type
    look_ahead(table, place, now, soon)          guessed routes of the next layer: which tiles come early
    seed(table, place, ids)                      a prompt's last tokens tell the policy what they used
    promote(table, place, addresses, span, quota)   which of a prompt's experts stay
    fetch_ahead(table, place, addresses)         copies what look_ahead or promote chose

Everything is stream-ordered: an arriving tile is read from host memory and kept in its slot by the same
launch that computes it, so a slot is complete for whatever is launched later, and no host decides anything.
Missing tiles are divided by `experts.split`'s rule: Q by the link in the policy's fill order, at most one
expert cut, the rest by the host. Without a victim an arriving expert is computed but not kept.

Shapes: T <= MOST_ROWS rows, k = top_k, E experts a layer, S slots (0 is no slot), NT tiles, R = T * k routes.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.expert_step import reference, triton
from freetoken.kernels.expert_step._types import COUNTERS, MOST_ROWS, VICTIMS, Call, Io, Place, Table

__all__ = ["COUNTERS", "EVERYONE", "MOST_ROWS", "VICTIMS", "Call", "Io", "Place", "Table"]

MAKERS = (reference, triton)
EVERYONE = 0x7FFFFFFF


def num_runs(device_type: str, num_tiles: int, tile_width: int) -> int:
    """Partials of one expert and row: how finely the maker divides a record."""
    runs: int = choose(MAKERS, device_type).num_runs(num_tiles, tile_width)
    return runs


def age(table: Table) -> None:
    choose(MAKERS, table.words.device.type).age(table)


def look_up(table: Table, place: Place, call: Call) -> None:
    choose(MAKERS, table.words.device.type).look_up(table, place, call)


def prepare_victims(table: Table, bound: int = EVERYONE) -> None:
    """bound: only experts of a lower id may go."""
    choose(MAKERS, table.words.device.type).prepare_victims(table, bound)


def run_tiles(table: Table, place: Place, call: Call) -> None:
    choose(MAKERS, table.words.device.type).run_tiles(table, place, call)


def combine(table: Table, place: Place, call: Call, residual: Tensor | None = None) -> Tensor:
    out: Tensor = choose(MAKERS, table.words.device.type).combine(table, place, call, residual)
    return out


def look_ahead(table: Table, place: Place, now: Tensor, soon: Tensor) -> None:
    """Choose up to `table.budget` tiles of `place`'s layer to bring before it looks up.

    now, soon   int32 [T, k]: the routes of the layer before, and the guessed ones of this layer
    """
    choose(MAKERS, table.words.device.type).look_ahead(table, place, now, soon)


def seed(table: Table, place: Place, ids: Tensor) -> None:
    """Count int32 [R, k] routes of a prompt's last tokens, and move the policy's averages towards them."""
    choose(MAKERS, table.words.device.type).seed(table, place, ids)


def promote(table: Table, place: Place, addresses: Tensor, span: tuple[int, int], quota: int) -> None:
    """Give slots to the layer's `quota` most used experts, of those in `span` that lie at an address.

    addresses   int64 [E]: where each expert's record lies on the device, 0 = nowhere
    Only experts that come before the span's end make room, and only for hotter ones: who planned a prompt's
    copies counts on the residents still to come.
    """
    choose(MAKERS, table.words.device.type).promote(table, place, addresses, span, quota)


def fetch_ahead(table: Table, place: Place, addresses: Tensor | None = None) -> None:
    """Copy what was chosen into its slots, from host memory or from addresses on the device, int64 [E].

    The layer before must be through with its slots.
    """
    choose(MAKERS, table.words.device.type).fetch_ahead(table, place, addresses)
