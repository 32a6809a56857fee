"""Reading matrices of a source whatever codes them: numbers for dense parts, codes for the bank.

The one place that loads formats by the name a source gives. Invariant: numbers are exactly what the
format's own `decode` says, and codes are handed on untouched.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.interfaces import Numerics
from freetoken.core.weights import (
    BLOCKS,
    PACKED,
    CodedMatrix,
    CodedWeight,
    WeightFormat,
    WeightSource,
)
from freetoken.kernels.coded_linear import every_number, fast
from freetoken.quant._coded import CodedFormat
from freetoken.quant._gguf import GgufFormat
from freetoken.quant._mixed import JOIN, MixedFormat, joined_name, split_name

T = TypeVar("T")


@functools.cache
def find(name: str) -> WeightFormat:
    """The format of that name; of several joined by plus, the one that mixes them."""
    if JOIN in name:
        return _mixed(name, [find(part) for part in split_name(name)])
    fmt: WeightFormat = choices.load("freetoken.quant", name).FORMAT
    return fmt


def _mixed(what: str, formats: Sequence[WeightFormat]) -> WeightFormat:
    coded = [fmt for fmt in formats if isinstance(fmt, CodedFormat)]
    if len(coded) == len(formats):
        return MixedFormat(coded)
    raise WeightsError(
        f"One expert's matrices are coded in different ways that can't share a record: {what}.",
        code="unknown_weight_format",
        hint="Use a checkpoint whose gate, up and down are all coded, or all plain.",
    )


def numbers(source: WeightSource, name: str, index: int | None = None) -> Tensor:
    """A tensor as numbers: plain ones as stored, coded ones decoded to float32.

    index   one matrix of a stack [n, rows, K]; the rest is not read
    """
    if coding := source.coding(name):
        found = _decoded(find(coding), name, stored(source, name, index))
        columns = source.columns(name)
        return found if columns is None else found[..., columns.argsort()]
    return source.read(name) if index is None else source.read_rows(name, index, index + 1)[0]


def _decoded(fmt: WeightFormat, name: str, coded: CodedMatrix) -> Tensor:
    """float32 [.., rows, K]; by the native library where it knows the format: the same numbers."""
    shape = coded["codes"].shape
    if len(shape) == 2 and fast("cpu", fmt, (shape[0], shape[1])):
        return every_number(CodedWeight(fmt, _packed(fmt, name, coded), (shape[0], shape[1])))
    raw = PACKED in coded or BLOCKS in coded
    return fmt.decode(_adopted(fmt, name, coded) if raw else coded)


def _packed(fmt: WeightFormat, name: str, coded: CodedMatrix) -> Tensor:
    """uint8 [matrix_bytes]. WeightsError with the name if a scale is not a number."""
    if PACKED in coded:
        return coded[PACKED]
    rows, columns = coded["codes"].shape
    packed = torch.empty(fmt.matrix_bytes(rows, columns), dtype=torch.uint8)
    with _naming(name):
        fmt.pack_matrix(coded, packed)
    return packed


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Faults of codes with the tensor's name."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{name}: {error.message}", code=error.code, hint=error.hint) from error


def codes(source: WeightSource, name: str, index: int | None = None) -> CodedMatrix:
    """A coded matrix as it is. WeightsError with its name if a scale is not a number."""
    return _adopted(find(source.coding(name)), name, source.read_coded(name, index))


def _adopted(fmt: WeightFormat, name: str, coded: CodedMatrix) -> CodedMatrix:
    with _naming(name):
        if PACKED in coded:
            rows, columns = coded["codes"].shape
            coded = fmt.unpack_matrix(coded[PACKED], (rows, columns))
        else:
            coded = fmt.from_gguf(coded[BLOCKS]) if BLOCKS in coded else fmt.adopt(coded)
        fmt.refuse(coded)
    return coded


def stays_coded(source: WeightSource, name: str, device_type: str, *, exact: bool = False) -> bool:
    """True for a dense matrix that is multiplied in its codes there, not turned into numbers first."""
    coding, shape = source.coding(name), source.shape(name)
    return (
        bool(coding)
        and not exact
        and len(shape) == 2
        and fast(device_type, find(coding), (shape[0], shape[1]))
    )


def stacks(coding: str) -> bool:
    """True if matrices of the format one below the other are a matrix of the format: no scale spans rows."""
    fmt = find(coding)
    return isinstance(fmt, CodedFormat) and all(part.rows == 1 and part.columns for part in fmt.parts)


def below(coded: Iterable[CodedMatrix]) -> CodedMatrix:
    """Matrices of a format that `stacks`, one below the other."""
    several = list(coded)
    return {key: _cat([one[key] for one in several]) for key in several[0]} if several[1:] else several[0]


def _cat(parts: list[Tensor]) -> Tensor:
    if not parts[0].is_meta:
        return torch.cat(parts)
    # A shape is all that is wanted, and torch would load its compiler to join these: seconds.
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])


def held_bytes(source: WeightSource, name: str, device_type: str, numerics: Numerics) -> int:
    """Bytes that a dense tensor takes once it is loaded."""
    shape = source.shape(name)
    if stays_coded(source, name, device_type, exact=numerics.exact):
        return find(source.coding(name)).matrix_bytes(shape[0], shape[1])
    return int(math.prod(shape) * numerics.dtype.itemsize)


def stored(source: WeightSource, name: str, index: int | None = None) -> CodedMatrix:
    """A coded matrix for a tile: packed, or as blocks where they can be cut as they are, else its codes."""
    found, fmt = source.read_coded(name, index), find(source.coding(name))
    if PACKED in found:
        return found
    cuts = BLOCKS in found and isinstance(fmt, GgufFormat) and fmt.blocks is not None
    return found if cuts else _adopted(fmt, name, found)


def weight(source: WeightSource, names: Sequence[str]) -> CodedWeight:
    """Matrices of one coding, one below the other if there are several, as they are multiplied."""
    fmt, shapes = find(source.coding(names[0])), [source.shape(name) for name in names]
    height, columns = sum(shape[0] for shape in shapes), shapes[0][1]
    order = source.columns(names[0])
    if source.packs(names[0]):
        some = [source.read_coded(name)[PACKED] for name in names]
        if some[1:]:
            packed = fmt.below(some, [shape[0] for shape in shapes], columns)
        else:
            packed = some[0] if source.owned else some[0].clone()
    else:
        packed = _packed(fmt, ", ".join(names), below(stored(source, name) for name in names))
    return CodedWeight(fmt, packed, (height, columns), order)


def check_packed(source: WeightSource) -> None:
    """WeightsError for a packed matrix that is not as long as its format packs one of its shape."""
    for name in source.names():
        if not source.packs(name):
            continue
        shape, size = source.shape(name), source.stored_bytes(name)
        try:
            wanted = find(source.coding(name)).matrix_bytes(shape[0], shape[1])
        except (ConfigError, WeightsError) as error:
            raise _not_packed(name, f"{source.coding(name)} {list(shape)}: {error.message}") from error
        if wanted != size:
            what = f"{size} bytes of {source.coding(name)} {list(shape)}, {wanted} are needed"
            raise _not_packed(name, what)


def _not_packed(name: str, what: str) -> WeightsError:
    return WeightsError(
        f"{name} can't be read: {what}.",
        code="invalid_index",
        hint="Write the directory anew from the original checkpoint with ft checkpoint.",
    )


def rows(coded: CodedMatrix, some: slice | Tensor) -> dict[str, Tensor]:
    """Some rows of a coded matrix, as gate and up of a fused one, or in another order (int64).

    WeightsError if that would cut a scale.
    """
    count = coded["codes"].shape[-2]
    return {name: _rows(name, part, some, count) for name, part in coded.items()}


def _rows(name: str, part: Tensor, some: slice | Tensor, count: int) -> Tensor:
    height = part.shape[-2]
    if height == count:
        return part[..., some, :]
    if height == 1:
        return part
    if isinstance(some, Tensor):
        raise WeightsError(f"Rows in another order would cut a block of {name}.", code="invalid_tensor_shape")
    # Blocks of rows are a power of two tall; then count / height is their height if it is whole.
    span = count // height
    start, stop, step = some.indices(count)
    if count % height or span & (span - 1) or start % span or stop % span or step != 1:
        raise WeightsError(
            f"Rows {start}..{stop} of {count} cut a block of {name} in two.",
            code="invalid_tensor_shape",
            hint="This checkpoint fuses matrices whose scales span both; use one with separate tensors.",
        )
    return part[..., start // span : stop // span, :]


def of_expert(source: WeightSource, names: Sequence[str]) -> WeightFormat:
    """The format that holds one expert's tensors as they are. WeightsError names those that none holds.

    names   gate, up and down; or gate and up in one, and down
    """
    found = [_format_of(source, name) for name in names]
    if len({fmt.name for fmt in found}) == 1:
        return found[0]
    what = ", ".join(f"{name} is {fmt.name}" for name, fmt in zip(names, found, strict=True))
    return _mixed(what, _three(found))


def expert_coding(source: WeightSource, names: Sequence[str]) -> str:
    """The name of the format whose codes an expert's tensors are; empty if one of them is plain."""
    codings = [source.coding(name) for name in names]
    return joined_name(_three(codings)) if all(codings) else ""


def _three(parts: Sequence[T]) -> Sequence[T]:
    """Of gate, up and down, where gate and up may be one."""
    return (parts[0], *parts) if len(parts) == 2 else parts


def _format_of(source: WeightSource, name: str) -> WeightFormat:
    if coding := source.coding(name):
        return find(coding)
    dtype = source.dtype(name)
    for fmt in _all():
        if fmt.detects(dtype):
            return fmt
    raise WeightsError(
        f"{name} is {dtype}; no weight format reads that.",
        code="unknown_weight_format",
        hint=f"There are: {', '.join(fmt.name for fmt in _all())}.",
    )


@functools.cache
def _all() -> tuple[WeightFormat, ...]:
    return tuple(find(name) for name in choices.names("freetoken.quant"))
