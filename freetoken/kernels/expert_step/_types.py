"""What a layer-step of experts is told: residency, place, the host's block, the call. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core.codes import Coded
from freetoken.core.model_config import Activation
from freetoken.kernels.expert_step import _rules as rules

MOST_ROWS = 64
VICTIMS = 32
STEP, SEQUENCE, CREDIT, FAILED, PENDING, PASSED = range(6)
FILLED, EVICTIONS, AHEAD, JUDGED, RIGHT, PROMOTED = 4, 7, 8, 9, 10, 11
COUNTERS = 12


@dataclass(frozen=True)
class Table:
    """Residency, all int32 on the device unless said otherwise. Expert ids are global.

    slot_of [L*E] -1 = none    expert_of [S] -1 = none    tiles_in [S] a prefix of the record
    whole [L*E]                tiles of each record
    fast, slow [L*E]           the two averages of policy two_speed (LRU: `fast` holds the last step)
    victims [VICTIMS]          slots that may be given away, coldest first, 0 = none
    words [16]                 STEP SEQUENCE CREDIT FAILED PENDING PASSED
    split [BUCKETS, 2]         alpha, beta as Q16.16 (experts.split)
    stats int64 [COUNTERS]     requests, hits, misses, missing, filled and host tiles, fills, EVICTIONS;
                               tiles brought ahead, those whose layer looked up since, those it wanted;
                               experts that a prompt left behind
    work [E, 4]                the layer-step's list: expert, slot, tiles here, tiles computed here
    here [E]                   tiles computed here, by expert of the layer
    usable [1]                 slots that are mapped
    ahead [VICTIMS, 4]         what was brought ahead: expert, slot, first tile, end; -1 ends the list
    counts [E]                 uses of a layer's experts by a prompt's last tokens
    budget [1]                 tiles to bring ahead of a layer, at most VICTIMS
    policy                     "two_speed" or "lru"
    """

    slot_of: Tensor
    expert_of: Tensor
    tiles_in: Tensor
    whole: Tensor
    fast: Tensor
    slow: Tensor
    victims: Tensor
    words: Tensor
    split: Tensor
    stats: Tensor
    work: Tensor
    here: Tensor
    usable: Tensor
    ahead: Tensor
    counts: Tensor
    budget: Tensor
    policy: str = "two_speed"

    @classmethod
    def empty(
        cls,
        tiles: Sequence[int],
        experts: int,
        slots: int,
        device: torch.device | str,
        policy: str = "two_speed",
    ) -> Table:
        """No expert has a slot. tiles: of each layer's records; slots: S - 1, of which all are mapped."""

        def ints(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        total, first = len(tiles) * experts, torch.arange(1, VICTIMS + 1, dtype=torch.int32)
        return cls(
            slot_of=ints(total, value=-1),
            expert_of=ints(slots + 1, value=-1),
            tiles_in=ints(slots + 1),
            whole=torch.tensor(tiles, dtype=torch.int32).repeat_interleave(experts).to(device),
            fast=ints(total),
            slow=ints(total),
            victims=torch.where(first <= slots, first, 0).to(device),
            words=ints(16),
            split=ints(rules.BUCKETS, 2),
            stats=ints(COUNTERS, dtype=torch.int64),
            work=ints(experts, 4, value=-1),
            here=ints(experts),
            usable=ints(1, value=slots + 1),
            ahead=ints(VICTIMS, 4, value=-1),
            counts=ints(experts),
            budget=ints(1),
            policy=policy,
        )


@dataclass(frozen=True)
class Place:
    """Where a layer's records lie and how.

    records   uint8 [E, record_bytes] in host memory; `address` is what the device calls it. 0: it can't see
              them, so all that misses must be left to the host (a split of alpha -1)
    slots     uint8 [S, slot_bytes] on the device
    coded     what a record holds and where; numbers of the activations' type are read as they are
    slow_link   int64 [4] where records are read as if over a slower link (`kernels.slow_link`)
    """

    layer: int
    num_experts: int
    records: Tensor
    address: int
    slots: Tensor
    coded: Coded
    activation: Activation
    slow_link: Tensor | None = None

    @property
    def hidden(self) -> int:
        return self.coded.hidden

    @property
    def num_tiles(self) -> int:
        return self.coded.num_tiles

    @property
    def tile_bytes(self) -> int:
        return self.coded.tile_bytes

    @property
    def tiles_offset(self) -> int:
        return self.coded.tiles_offset

    @property
    def slots_address(self) -> int:
        return 0 if self.slots.is_meta else self.slots.data_ptr()


@dataclass(frozen=True)
class Io:
    """The block that the device shares with the host executor, as `experts.device_io` lays it out.

    address   what the device calls byte 0; the tensors are the host's views
    request int32 [16], reply int32 [16], poison int32 [16], items int32 [E, 4], ids int32 [T, k],
    x [T, H], out float32 [R, H]; offsets in bytes: items, ids, x, out
    """

    address: int
    bytes: Tensor
    request: Tensor
    reply: Tensor
    poison: Tensor
    items: Tensor
    ids: Tensor
    x: Tensor
    out: Tensor
    offsets: tuple[int, int, int, int]


@dataclass(frozen=True)
class Call:
    """One layer-step: x [T, H] 16-bit, ids int32 [T, k] (-1 = dead), weights float32 [T, k].

    partials float32 [R, num_runs(..), H], scratch; io None: nothing may be left to the host.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    partials: Tensor
    io: Io | None
    bucket: int = 0
