"""The types of GGUF tensors: how many elements a block holds, in how many bytes, and our word for it.

A type is plain numbers (`dtype`), or the blocks of a weight format (`format`, a file of `quant/`), or
known by size only: such a tensor is refused by name where its numbers are needed. Ids are the file's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockType:
    """elements and num_bytes of a block; plain types have blocks of one.

    format   the weight format whose blocks these are; empty for plain numbers and for what nobody reads
    """

    name: str
    elements: int
    num_bytes: int
    format: str = ""
    dtype: torch.dtype | None = None


def _plain(name: str, dtype: torch.dtype) -> BlockType:
    return BlockType(name, 1, dtype.itemsize, dtype=dtype)


def _coded(name: str, elements: int, num_bytes: int) -> BlockType:
    return BlockType(name, elements, num_bytes, name.lower())


TYPES = {
    0: _plain("F32", torch.float32),
    1: _plain("F16", torch.float16),
    2: _coded("Q4_0", 32, 18),
    3: _coded("Q4_1", 32, 20),
    6: _coded("Q5_0", 32, 22),
    7: _coded("Q5_1", 32, 24),
    8: _coded("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: _coded("Q2_K", 256, 84),
    11: _coded("Q3_K", 256, 110),
    12: _coded("Q4_K", 256, 144),
    13: _coded("Q5_K", 256, 176),
    14: _coded("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: _coded("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: _coded("IQ4_NL", 32, 18),
    21: _coded("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: _coded("IQ4_XS", 256, 136),
    24: _plain("I8", torch.int8),
    25: _plain("I16", torch.int16),
    26: _plain("I32", torch.int32),
    27: _plain("I64", torch.int64),
    28: _plain("F64", torch.float64),
    29: BlockType("IQ1_M", 256, 56),
    30: _plain("BF16", torch.bfloat16),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: _coded("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
_GONE = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


def type_name(kind: int) -> str:
    """A type id as people read it, for ids outside the table."""
    return f"{_GONE[kind]} (a type no longer in use)" if kind in _GONE else f"unknown type {kind}"
