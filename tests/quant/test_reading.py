"""Reading coded matrices: rows of a fused one, one expert's format, numbers where numbers are wanted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.weights import CodedMatrix, WeightSource
from freetoken.quant import _reading as reading
from freetoken.quant import fp8_block, mxfp4, nvfp4


class Stored(WeightSource):
    """Matrices in memory: (format, codes) or plain tensors."""

    def __init__(self, tensors: dict[str, Tensor | tuple[str, CodedMatrix]]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        one = self.tensors[name]
        return tuple((one if isinstance(one, Tensor) else one[1]["codes"]).shape)

    def dtype(self, name: str) -> torch.dtype:
        one = self.tensors[name]
        return one.dtype if isinstance(one, Tensor) else torch.uint8

    def read(self, name: str) -> Tensor:
        one = self.tensors[name]
        assert isinstance(one, Tensor)
        return one

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.read(name)[start:stop]

    def coding(self, name: str) -> str:
        one = self.tensors[name]
        return "" if isinstance(one, Tensor) else one[0]

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        coded = self.tensors[name][1]
        return coded if index is None else {k: v[index] for k, v in coded.items()}

    def close(self) -> None: ...


@pytest.mark.parametrize("fmt", [mxfp4.FORMAT, nvfp4.FORMAT, fp8_block.FORMAT], ids=lambda f: f.name)
@pytest.mark.parametrize("some", [slice(0, 128), slice(128, 256)])
def test_rows_of_a_coded_matrix_are_rows_of_its_numbers(fmt, some: slice) -> None:
    coded = fmt.encode(torch.randn(256, 64))
    assert torch.equal(fmt.decode(reading.rows(coded, some)), fmt.decode(coded)[some])


def test_every_second_row_can_be_taken_where_scales_lie_within_rows() -> None:
    coded = mxfp4.FORMAT.encode(torch.randn(8, 64))
    odd = reading.rows(coded, slice(1, None, 2))
    assert torch.equal(mxfp4.FORMAT.decode(odd), mxfp4.FORMAT.decode(coded)[1::2])


@pytest.mark.parametrize(
    ("height", "some"), [(256, slice(0, 64)), (256, slice(0, None, 2)), (192, slice(0, 96))]
)
def test_rows_that_would_cut_a_scale_are_refused(height: int, some: slice) -> None:
    with pytest.raises(WeightsError, match="scales") as e:
        reading.rows(fp8_block.FORMAT.encode(torch.randn(height, 64)), some)
    assert e.value.code == "invalid_tensor_shape"


def test_numbers_are_what_the_format_decodes_one_of_a_stack_too() -> None:
    coded = nvfp4.FORMAT.encode(torch.randn(3, 8, 32))
    plain = torch.randn(3, 8, 32)
    source = Stored({"coded": ("nvfp4", coded), "plain": plain})
    assert torch.equal(reading.numbers(source, "coded"), nvfp4.FORMAT.decode(coded))
    assert torch.equal(reading.numbers(source, "coded", 2), nvfp4.FORMAT.decode(coded)[2])
    assert torch.equal(reading.numbers(source, "plain", 1), plain[1])


def test_an_experts_format_is_the_one_all_its_matrices_share() -> None:
    coded = ("mxfp4", mxfp4.FORMAT.encode(torch.randn(8, 32)))
    source = Stored({"a": coded, "b": coded, "c": torch.zeros(2).bfloat16(), "d": torch.zeros(2).int()})
    assert reading.of_expert(source, ("a", "b")) is mxfp4.FORMAT
    assert reading.of_expert(source, ("c",)).name == "bf16"
    for names in (("a", "c"), ("d",)):
        with pytest.raises(WeightsError) as e:
            reading.of_expert(source, names)
        assert e.value.code == "unknown_weight_format" and names[0] in e.value.message
