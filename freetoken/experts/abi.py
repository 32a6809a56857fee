"""The ctypes mirror of `native/abi.h`: one IO block of host memory that device and executor share.

The header holds the memory map and the ordering argument; a test compiles it and compares offsets.
`IoBlock` only makes and views the bytes; when they may be read is the caller's (a stream's) matter.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.core.units import align_up

MAGIC, VERSION = 0x4F495446, 1
OK, POISONED, FAILED = 0, 1, 2
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_U32, _U64, _I32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Layout(ctypes.Structure):
    _fields_ = _fields(
        _U32, "magic version hidden x_dtype max_items max_rows max_tokens max_out_rows"
    ) + _fields(_U64, "items_offset rows_offset x_offset out_offset")


class Request(ctypes.Structure):
    _fields_ = _fields(_U32, "sequence layer num_items num_rows num_tokens whole_sums") + [
        ("reserved", _U32 * 10)
    ]


class Reply(ctypes.Structure):
    _fields_ = _fields(_U32, "done status") + [("reserved", _U32 * 14)]


class Poison(ctypes.Structure):
    _fields_ = [("word", _U32), ("reserved", _U32 * 15)]


class Item(ctypes.Structure):
    _fields_ = _fields(_I32, "expert first_tile last_tile first_row num_rows out_row") + [("source", _U64)]


class Io(ctypes.Structure):
    _fields_ = [("layout", Layout), ("request", Request), ("reply", Reply), ("poison", Poison)]


REQUEST_BYTES = ctypes.sizeof(Request)
ITEM_WORDS = ctypes.sizeof(Item) // 4


class IoBlock:
    """One block's bytes and the views of its regions.

    request  int32 [16]              sequence, layer, num_items, num_rows, num_tokens
    reply    int32 [16]              done, status
    items    int32 [max_items, 8]    the fields of `Item`; `source` is the last two words
    rows     int32 [max_rows]
    x        dtype [max_tokens, H]
    out      float32 [max_out_rows, H]
    """

    def __init__(
        self,
        hidden: int,
        dtype: torch.dtype,
        *,
        max_items: int,
        max_rows: int,
        max_tokens: int,
        out_rows: int,
    ) -> None:
        size = torch.empty(0, dtype=dtype).element_size()
        at, offsets = ctypes.sizeof(Io), []
        for region in (max_items * ctypes.sizeof(Item), max_rows * 4, max_tokens * hidden * size):
            offsets.append(at)
            at = align_up(at + region, 64)
        offsets.append(at)
        self.bytes = torch.zeros(at + out_rows * hidden * 4 + 64, dtype=torch.uint8)
        self.bytes = self.bytes[-self.bytes.data_ptr() % 64 :]
        self.header = Io.from_address(self.bytes.data_ptr())
        self.header.layout = Layout(
            MAGIC, VERSION, hidden, DTYPES[dtype], max_items, max_rows, max_tokens, out_rows, *offsets
        )
        self.max_items, self.max_rows, self.max_tokens, self.out_rows = (
            max_items,
            max_rows,
            max_tokens,
            out_rows,
        )
        a, b, c, d = offsets
        self.request = self.bytes[64:128].view(torch.int32)
        self.reply = self.bytes[128:192].view(torch.int32)
        self.poison = self.bytes[192:256].view(torch.int32)
        self.items = self.bytes[a : a + max_items * 32].view(torch.int32).view(max_items, ITEM_WORDS)
        self.rows = self.bytes[b : b + max_rows * 4].view(torch.int32)
        self.x = self.bytes[c : c + max_tokens * hidden * size].view(dtype).view(max_tokens, hidden)
        self.out = self.bytes[d : d + out_rows * hidden * 4].view(torch.float32).view(out_rows, hidden)

    def item_array(self, items: list[tuple[int, int, int, int, int, int]], sources: list[int]) -> Tensor:
        """int32 [n, 8] from (expert, first tile, last tile, first row, rows, out row) and addresses."""
        words: NDArray[np.int32] = np.zeros((len(items), ITEM_WORDS), np.int32)
        if items:
            words[:, :6] = items
            words.view(np.uint64)[:, 3] = sources
        return torch.from_numpy(words)
