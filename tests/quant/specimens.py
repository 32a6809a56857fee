"""Coded matrices of any bytes whose scales are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.core.weights import WeightFormat
from freetoken.quant._coded import CodedFormat
from freetoken.quant._gguf import GgufFormat


def gguf_rows(fmt: WeightFormat, rows: int, blocks: int, seed: int = 0) -> Tensor:
    """Random bytes, every code and scale among them."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, blocks * fmt.gguf_bytes), dtype=torch.uint8, generator=draw)


def drawn(fmt: CodedFormat, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Any codes, integers of the range that the format reads, tame floating-point scales."""
    draw = torch.Generator().manual_seed(seed)
    if isinstance(fmt, GgufFormat):
        out = dict(fmt.from_gguf(gguf_rows(fmt, rows, columns // fmt.gguf_columns, seed)))
    else:
        codes = torch.randint(0, 1 << sum(fmt.planes), (rows, columns), dtype=torch.uint8, generator=draw)
        out = {"codes": torch.where(codes & 0x7F == 0x7F, 0, codes)}
    for part in fmt.parts:
        shape = (1, 1) if not part.columns else (-(-rows // part.rows), -(-columns // part.columns))
        if part.dtype.is_floating_point:
            out[part.name] = torch.randn(shape, generator=draw).to(part.dtype)
        elif part.name not in out:
            out[part.name] = torch.randint(0, 16, shape, dtype=part.dtype, generator=draw)
        elif part.dtype == torch.uint8:
            out[part.name] = out[part.name] % 255
    return out
