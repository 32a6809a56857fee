"""One MoE layer for the native library: a filled bank, requests, the float64 answer and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.interfaces import WeightFormat
from freetoken.experts.abi import OK, IoBlock
from freetoken.experts.bank import ExpertBank
from freetoken.experts.native_executor import describe
from freetoken.experts.record import layout
from freetoken.native.library import Library, library
from freetoken.quant._coded import CodedFormat
from freetoken.quant._fp8 import Fp8

FORMATS: dict[str, WeightFormat] = {
    name: choices.load("freetoken.quant", name).FORMAT for name in choices.names("freetoken.quant")
}
CODED = {name: form for name, form in FORMATS.items() if isinstance(form, CodedFormat)}
EPS32, EPS = 2.0**-24, {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TINY = 2.0**-120
"""Bfloat16 products treat subnormals as zero."""


def lib() -> Library:
    found = library()
    assert found is not None
    return found


@dataclass(frozen=True)
class Item:
    expert: int
    rows: Sequence[int]
    first: int = 0


@dataclass
class One:
    """A filled bank of one layer. `weights[e]` are gate, up, down_t as float64 [T, w, H], as coded."""

    bank: ExpertBank
    weights: list[tuple[Tensor, Tensor, Tensor]]
    biases: list[tuple[Tensor, Tensor, Tensor]]

    @property
    def tiles(self) -> int:
        return self.bank.layouts[0].num_tiles


def one(
    fmt: str, hidden: int, width: int, tile: int = 0, experts: int = 3, seed: int = 0, *, biased: bool = False
) -> One:
    """A layer of random experts in a format."""
    form = FORMATS[fmt]
    bank = ExpertBank([layout(hidden, width, form, tile, biased=biased)], [form], experts)
    draw = torch.Generator().manual_seed(seed)
    made, added = [], []
    for expert in range(experts):
        matrices = [torch.randn(width, hidden, generator=draw) * hidden**-0.5 for _ in range(3)]
        if fmt in ("bf16", "f16"):
            matrices = [m.to(torch.bfloat16 if fmt == "bf16" else torch.float16) for m in matrices]
        gate, up, down = (torch.randn(n, generator=draw) * float(biased) for n in (width, width, hidden))
        biases = (gate, up, down)
        bank.put(0, expert, matrices[0], matrices[1], matrices[2].t(), biases if biased else None)
        made.append(stored(bank, expert))
        added.append((gate.double(), up.double(), down.double()))
    return One(bank, made, added)


def hidden_unit(fmt: str) -> int:
    return CODED[fmt].columns_multiple if fmt in CODED else 8


def every_code(fmt: str) -> One:
    """An expert of all codes there are: subnormal, negative zero, largest. Scales stay as they are."""
    form = FORMATS[fmt]
    made = one(fmt, 256, 256, 256, 1)
    at = made.bank.layouts[0]
    raw = made.bank.record(0)[: at.code_bytes]
    draw = torch.Generator().manual_seed(1)
    if isinstance(form, CodedFormat):
        for stream in form.streams(256, 256):
            if stream.part is None or stream.part not in form.parts:  # codes, whatever they look like
                part = raw[stream.offset : stream.offset + stream.num_bytes]
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=draw))
                if isinstance(form, Fp8):
                    part[part & 0x7F == 0x7F] = 0x7E
    else:
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[fmt]
        values = raw.view(kind)
        tiny = torch.finfo(kind).tiny
        values[::7] *= tiny * (2 if fmt == "f16" else 1e30)
        values[::11] = 0.0
    made.weights[0] = stored(made.bank, 0)
    return made


def stored(bank: ExpertBank, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    at, form = bank.layouts[0], bank.formats[0]
    raw = bank.record(expert)[at.tiles_offset : at.used_bytes].view(at.num_tiles, at.tile_bytes)
    gate, up, down = form.tile_weights(raw[:, : at.code_bytes], at.tile_width, at.hidden)
    return gate.double(), up.double(), down.double()


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def request(made: One, x: Tensor, items: Sequence[Item]) -> IoBlock:
    """An IO block with the request in it."""
    tiles, rows, out_rows, words = made.tiles, [], 0, []
    for item in items:
        m = len(item.rows)
        words.append((item.expert, item.first, tiles, len(rows), m, out_rows))
        rows += item.rows
        out_rows += m if item.first == 0 else m * (tiles - item.first)
    io = IoBlock(
        x.shape[1],
        x.dtype,
        max_items=len(items),
        max_rows=len(rows),
        max_tokens=x.shape[0],
        out_rows=out_rows,
    )
    io.items[:] = io.item_array(words, [made.bank.record(i.expert).data_ptr() for i in items])
    io.rows[:] = torch.tensor(rows, dtype=torch.int32)
    io.x.copy_(x)
    io.request[:5] = torch.tensor([1, 0, len(items), len(rows), x.shape[0]], dtype=torch.int32)
    return io


def answer(made: One, io: IoBlock, tier: str = "", **layer: float) -> Tensor:
    """What the library says; float32 [out_rows, H]."""
    described = describe(made.bank, 0)
    assert described is not None
    for name, value in layer.items():
        setattr(described, name, value)
    handle = lib().new_executor([described], tier)
    assert handle
    out = torch.full_like(io.out, float("nan"))
    assert lib().serve(handle, io.bytes.data_ptr(), out.data_ptr(), 20000) == OK
    lib().free_executor(handle)
    return out


def act_silu(g: Tensor, u: Tensor) -> Tensor:
    return g * torch.sigmoid(g) * u


def reference(made: One, x: Tensor, items: Sequence[Item], act=act_silu) -> tuple[Tensor, Tensor]:
    """float64 answers [out_rows, H] and how far float32 sums and the one rounding may be from them."""
    outs, bounds = [], []
    hidden, eps = x.shape[1], EPS[x.dtype]
    for item in items:
        gate, up, down = made.weights[item.expert]
        rows = torch.tensor(item.rows)
        xs = torch.where(rows[:, None] >= 0, x.double()[rows.clamp(min=0)], 0.0)
        gamma = (hidden + 64) * EPS32
        parts, errors = [], []
        extra = [b.unflatten(0, (made.tiles, -1)) for b in made.biases[item.expert][:2]]
        for t in range(item.first, made.tiles):
            g, u = xs @ gate[t].t() + extra[0][t], xs @ up[t].t() + extra[1][t]
            eg = gamma * (xs.abs() @ gate[t].abs().t()) + TINY
            eu = gamma * (xs.abs() @ up[t].abs().t()) + TINY
            middle = act(g, u)
            slack = 1.2 * eg * (u.abs() + 1) + eu * (g.abs() + 1) + (eps + 16 * EPS32) * middle.abs() + TINY
            if x.dtype == torch.float16:
                slack = slack + 2.0**-25  # its subnormals
            parts.append(middle @ down[t])
            size = (middle.abs() + slack) @ down[t].abs()
            errors.append(slack @ down[t].abs() + (made.tiles * gate.shape[1] + 64) * EPS32 * size + TINY)
        if item.first == 0:
            outs.append(torch.stack(parts).sum(0) + made.biases[item.expert][2])
            bounds.append(torch.stack(errors).sum(0))
        else:
            outs += parts
            bounds += errors
    return torch.cat(outs), torch.cat(bounds)


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x w^T + bias in float64, and how far a product of x's type may be from it."""
    given = torch.zeros(()) if bias is None else bias
    want = x.double() @ w.double().t() + given.double()
    size = x.double().abs() @ w.double().abs().t() + given.double().abs()
    bound = (x.shape[1] + 32) * EPS32 * size + EPS[x.dtype] * want.abs() + TINY
    return want, bound + 2.0**-25 * (x.dtype == torch.float16)


def within(out: Tensor, want: Tensor, bound: Tensor) -> None:
    error = (out.double() - want).abs()
    worst = (error / bound).max()
    assert bool(torch.isfinite(out).all()) and float(worst) <= 1.0, f"{float(worst):.3g} times the bound"
